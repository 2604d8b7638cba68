/** A rank that the pool is made of. */
export interface Member {
  rank: number;
  state: 'here' | 'waiting' | 'starting' | 'ready' | 'leaving' | 'lost';
  /** Why it is lost; empty while it is not. */
  reason: string;
  host: string;
  pid: number;
  /** When its process came, in seconds since the epoch; 0 if that is not known. */
  since: number;
  /** Event that brought it: `start`, `resize`, `repair`, `restart`, `attach`. */
  by: string;
}

/** Something that happened to a rank; the number is negative for what happened to the world. */
export interface Change {
  rank: number;
  what: 'joined' | 'waits' | 'admitted' | 'died' | 'left' | 'formed';
  why: string;
  host: string;
  pid: number;
  /** Seconds since the epoch, by the kernel's clock. */
  when: number;
}

/** A cell that goes on while ranks come and go. */
export interface ElasticCell {
  label: string;
  atLeast: number;
  atMost: number | null;
  ranks: number[];
}

/** State of a pool's ranks as the kernel sends it, made by `widgets/pool_membership.py`. */
export interface MembershipState {
  headline: string;
  generation: number;
  members: Member[];
  /** Ranks that have received none of the variables of others. */
  newcomers: number[];
  cells: ElasticCell[];
  history: Change[];
  /** Changes before those. */
  earlier: number;
  ended: boolean;
  /** Change of the pool that is under way; empty if there is none. */
  busy: string;
  /** Whether single ranks can be started. */
  replaceable: boolean;
  /** The kernel's clock when it sent this. */
  now: number;
}

export type Phase = 'here' | 'waiting' | 'missing';

/** A stretch of a rank's life; `to` is `null` while it lasts. */
export interface Stretch {
  phase: Phase;
  from: number;
  to: number | null;
  /** Event that began it. */
  began: Change | null;
}

export const ALL = -1;

/** The life of each rank in stretches, by its number; what came before the history is taken as it must have been. */
export function lives(state: MembershipState): Map<number, Stretch[]> {
  const { history } = state;
  const begin = history[0]?.when ?? state.now;
  const found = new Map<number, Stretch[]>();
  const life = (rank: number) => {
    if (!found.has(rank)) found.set(rank, []);
    return found.get(rank)!;
  };
  /** End the current stretch, and begin the next one unless that is `null`. */
  const turn = (change: Change, before: Phase | null, after: Phase | null) => {
    const all = life(change.rank);
    const last = all.at(-1);
    if (last?.to === null) last.to = change.when;
    else if (!last && before) all.push({ phase: before, from: begin, to: change.when, began: null });
    if (after) all.push({ phase: after, from: change.when, to: null, began: change });
  };
  for (const change of history) {
    if (change.rank < 0) continue;
    if (change.what === 'joined' || change.what === 'admitted') turn(change, state.earlier && change.what === 'admitted' ? 'waiting' : null, 'here');
    else if (change.what === 'waits') turn(change, state.earlier ? 'here' : null, 'waiting');
    else turn(change, 'here', change.what === 'died' ? 'missing' : null);
  }
  for (const { rank, state: now } of state.members) {
    const all = life(rank);
    if (!all.length && now !== 'lost' && now !== 'starting') all.push({ phase: 'here', from: begin, to: null, began: null });
  }
  // A dead rank that the pool no longer needs is missed no longer.
  const wanted = new Set(state.members.map(member => member.rank));
  for (const [rank, all] of found) {
    const last = all.at(-1);
    if (last?.phase === 'missing' && last.to === null && !wanted.has(rank)) all.pop();
  }
  return new Map([...found].sort(([a], [b]) => a - b));
}

/** Ranks that would end by a change of the size. */
export function endingBySize(state: MembershipState, size: number): number[] {
  return state.members.filter(member => member.rank >= size && member.state !== 'lost').map(member => member.rank);
}

/** Ranks that are lost. */
export function lost(state: MembershipState): number[] {
  return state.members.filter(member => member.state === 'lost').map(member => member.rank);
}
