import type { MembershipState } from './membership.ts';
import { Operations } from './operations.ts';
import { SeriesStore } from './series.ts';
import { grown, roomAtFirst, Track } from './tracks.ts';

/** Part of a view that the kernel could not bring up to date: a sentence, and the traceback for its developer. */
export interface Failure {
  text: string;
  trace: string;
}

/** One rank as the kernel reports it; times in ns. */
export interface RankRow {
  rank: number;
  host: string;
  pid: number;
  plane: string;
  state: string;
  reason: string;
  cell: string;
  /** Why it waits for its user: `at a prompt`; empty or missing if it does not. */
  paused?: string;
  spans: number;
  timesLast: number;
  heldUp: number;
  /** Whether others waited for it notably longer than for any other rank: see {@link slowestOf}. */
  slowest?: boolean;
  worst: number;
  /** Shares of the last seconds, 0 to 1. */
  wait: number;
  work: number;
  bandwidth: number;
}

/** Return the row of a rank whose kernel has ended: the rank has, too. A living kernel sends this itself (widgets/recording_feed.py). */
export function endedRow(row: RankRow): RankRow {
  const there = ['starting', 'running', 'idle'].includes(row.state);
  return there ? { ...row, state: 'ended', cell: '', paused: '' } : row;
}

// The same as in collectives/tracing/rank_activity.py, so that no view names a rank that another one does not.
const NOTABLE = 0.05;
const TIMES_THE_NEXT = 2;

/**
 * The rank that slows the others down: they waited for it for 5 % of a stretch of time at least, and twice as long as for any other.
 * `null` where no rank stands out: which of equal ranks was waited for longest is chance.
 */
export function slowestOf<T extends { readonly heldUp: number }>(ranks: readonly T[], length: number): T | null {
  const [first, next] = [...ranks].sort((a, b) => b.heldUp - a.heldUp);
  if (!first || !(first.heldUp > 0) || first.heldUp < length * NOTABLE) return null;
  return first.heldUp >= TIMES_THE_NEXT * (next?.heldUp ?? 0) ? first : null;
}

/** Columns of the rows of one rank, in the order in which it recorded them; times in ns, the later ones since arrival. */
export class Lane {
  readonly rank: number;
  n = 0;
  /** Rows that were here once and were forgotten. */
  dropped = 0;
  arrival: Float64Array;
  nbytes: Float64Array;
  ready: Float32Array;
  started: Float32Array;
  finished: Float32Array;
  name: Uint32Array;
  op: Uint32Array;
  kind: Uint8Array;
  flags: Uint8Array;
  /** The executor's work; this rank's waits for others; waits of others for this rank. */
  readonly work: Track;
  readonly wait: Track;
  readonly late: Track;

  constructor(rank: number) {
    this.rank = rank;
    const room = roomAtFirst(rank);
    [this.arrival, this.nbytes] = [new Float64Array(room), new Float64Array(room)];
    [this.ready, this.started, this.finished] = [new Float32Array(room), new Float32Array(room), new Float32Array(room)];
    [this.name, this.op] = [new Uint32Array(room), new Uint32Array(room)];
    [this.kind, this.flags] = [new Uint8Array(room), new Uint8Array(room)];
    [this.work, this.wait, this.late] = [new Track(room), new Track(room, false), new Track(room, false)];
  }

  private columns() {
    return [this.arrival, this.nbytes, this.ready, this.started, this.finished, this.name, this.op, this.kind, this.flags];
  }

  reserve(more: number): void {
    const size = this.n + more;
    if (this.arrival.length >= size) return;
    this.arrival = grown(this.arrival, size);
    this.nbytes = grown(this.nbytes, size);
    this.ready = grown(this.ready, size);
    this.started = grown(this.started, size);
    this.finished = grown(this.finished, size);
    this.name = grown(this.name, size);
    this.op = grown(this.op, size);
    this.kind = grown(this.kind, size);
    this.flags = grown(this.flags, size);
  }

  /** Forgets everything. */
  clear(): void {
    this.dropped += this.n;
    this.n = 0;
    for (const track of [this.work, this.wait, this.late]) track.clear();
  }

  /** Forget the oldest `count` rows and their tracks. */
  drop(count: number): void {
    const k = Math.min(count, this.n);
    if (!k) return;
    const time = this.arrival[k - 1] + this.finished[k - 1];
    for (const column of this.columns()) column.copyWithin(0, k, this.n);
    this.n -= k;
    this.dropped += k;
    for (const track of [this.work, this.wait, this.late]) track.dropBefore(time);
  }
}

export const FAILED = 1;
export const NOT_READY = 2;
export const NOT_STARTED = 4;

export const KINDS = ['allreduce', 'allgather', 'broadcast', 'reducescatter', 'alltoall', 'barrier', 'add process set', 'remove process set', 'join', 'push', 'pull', 'sendrecv'];

/** One message of rows, each column an array of the same length. Times in ns since the origin, later ones since arrival. */
export interface Rows {
  count: number;
  arrival: Float64Array;
  nbytes: Float64Array;
  ready: Float32Array;
  started: Float32Array;
  finished: Float32Array;
  waited: Float32Array;
  name: Uint32Array;
  op: Uint32Array;
  rank: Uint16Array;
  size: Uint16Array;
  kind: Uint8Array;
  flags: Uint8Array;
}

export const ROW_BYTES = 46;

/** State that the kernel sends for a pool that has ended. */
export const STOPPED = 'stopped';

/** Takes the columns out of one buffer, in which they lie one after the other. */
export function readRows(buffer: ArrayBuffer, count: number): Rows {
  if (buffer.byteLength !== count * ROW_BYTES) throw new Error(`${buffer.byteLength} bytes are not ${count} rows`);
  let at = 0;
  const take = <T>(Make: new (b: ArrayBuffer, o: number, n: number) => T, bytes: number): T => {
    const column = new Make(buffer, at, count);
    at += count * bytes;
    return column;
  };
  return {
    count,
    arrival: take(Float64Array, 8),
    nbytes: take(Float64Array, 8),
    ready: take(Float32Array, 4),
    started: take(Float32Array, 4),
    finished: take(Float32Array, 4),
    waited: take(Float32Array, 4),
    name: take(Uint32Array, 4),
    op: take(Uint32Array, 4),
    rank: take(Uint16Array, 2),
    size: take(Uint16Array, 2),
    kind: take(Uint8Array, 1),
    flags: take(Uint8Array, 1),
  };
}

/** Something that happened at one moment, or that lasted, besides collectives. */
export interface Mark {
  kind: 'cell' | 'abort' | 'joined' | 'left' | 'paused' | 'waiting' | 'formed';
  rank: number;
  begin: number;
  end: number | null;
  text: string;
  ok: boolean;
}

/** Time from which on rows have changed; the reader resets it to infinity. */
export interface Changed {
  from: number;
  end(): void;
}

/** Everything that is drawn, in bounded memory: the oldest rows are forgotten and counted. */
export class Store {
  readonly lanes: Lane[] = [];
  readonly operations = new Operations();
  readonly names: string[] = [''];
  /** Where in the code the collectives of each name were called, as people read it; empty or missing where it is not known. */
  readonly sites: string[] = [];
  /** The ranks and a line about all of them, as the kernel last sent them; empty until it has. */
  ranks: RankRow[] = [];
  heading = '';
  /** Which ranks there are and what became of others; `null` where the pool is only watched. */
  membership: MembershipState | null = null;
  /** Parts that the kernel could not bring up to date. */
  failures: Failure[] = [];
  readonly marks = new Map<number, Mark>();
  readonly series = new SeriesStore();
  readonly limit: number;
  /** Rows that are here; rows that were lost or forgotten before they came here. */
  count = 0;
  lostBefore = 0;
  /** Error of each rank's clock, in ns; only ranks on other hosts have one. */
  clockError = new Map<number, number>();
  begin = Infinity;
  end = -Infinity;
  /** Grows with each change. */
  version = 0;
  /** Number of times that a user cleared the store. */
  cleared = 0;
  private byRank: Lane[] = [];
  private droppedBefore = 0;
  private readonly watched = new Set<Changed>();

  constructor(limit = 1_000_000) {
    this.limit = limit;
  }

  get forgotten(): number {
    return this.dropped - this.droppedBefore;
  }

  private get dropped(): number {
    return this.lanes.reduce((sum, lane) => sum + lane.dropped, 0);
  }

  /** Forgets all rows and marks that are here; ranks, names and series stay. */
  clear(): void {
    for (const lane of this.lanes) lane.clear();
    this.droppedBefore = this.dropped;
    this.marks.clear();
    this.count = 0;
    this.begin = Infinity;
    this.end = -Infinity;
    this.cleared++;
    this.version++;
    this.changed(-Infinity);
  }

  /** Lets a view know from when on the picture has changed since it last looked. */
  watch(): Changed {
    const one = { from: -Infinity, end: () => void this.watched.delete(one) };
    this.watched.add(one);
    return one;
  }

  private changed(from: number): void {
    for (const one of this.watched) if (from < one.from) one.from = from;
  }

  lane(rank: number): Lane {
    let lane = this.byRank[rank];
    if (!lane) {
      lane = this.byRank[rank] = new Lane(rank);
      this.lanes.push(lane);
      this.lanes.sort((a, b) => a.rank - b.rank);
    }
    return lane;
  }

  append(rows: Rows): void {
    const { rank, count } = rows;
    for (let i = 0; i < count; i++) {
      const lane = this.byRank[rank[i]] ?? this.lane(rank[i]);
      this.add(lane, rows, i);
    }
    this.version++;
  }

  private add(lane: Lane, rows: Rows, i: number): void {
    const room = Math.max(1024, Math.ceil(this.limit / this.lanes.length));
    if (lane.n >= room) {
      const fewer = lane.n - room + (room >> 3) + 1;
      lane.drop(fewer);
      this.changed(-Infinity);
      this.count -= fewer;
      this.begin = Math.min(...this.lanes.map(l => (l.n ? l.arrival[0] : Infinity)));
    }
    lane.reserve(1);
    const k = lane.n++;
    this.count++;
    const arrival = rows.arrival[i];
    const finished = arrival + rows.finished[i];
    const flags = rows.flags[i];
    lane.arrival[k] = arrival;
    lane.nbytes[k] = rows.nbytes[i];
    lane.ready[k] = rows.ready[i];
    lane.started[k] = rows.started[i];
    lane.finished[k] = rows.finished[i];
    lane.name[k] = rows.name[i];
    lane.op[k] = rows.op[i];
    lane.kind[k] = rows.kind[i];
    lane.flags[k] = flags;
    if (arrival < this.begin) this.begin = arrival;
    if (finished > this.end) this.end = finished;
    this.place(lane, k, arrival, finished);
    const op = rows.op[i];
    if (op && this.operations.arrive(op, lane.rank, arrival, rows.size[i])) this.complete(op);
  }

  private place(lane: Lane, k: number, arrival: number, finished: number): void {
    this.changed(arrival);
    const flags = lane.flags[k];
    const work = lane.work;
    if (!(flags & NOT_STARTED)) {
      const started = arrival + lane.started[k];
      const last = work.n - 1;
      // Tensors that were fused come one after the other and share their operation's times, but for rounding.
      const slack = 1 + lane.finished[k] * 2 ** -22;
      if (last >= 0 && Math.abs(work.start[last] - started) < slack && Math.abs(work.end[last] - finished) < slack) work.rows[last]++;
      else work.push(started, finished, lane.kind[k] | (flags & FAILED ? 128 : 0), lane.dropped + k);
    }
    const ready = flags & NOT_READY ? finished : arrival + lane.ready[k];
    if (ready > arrival) lane.wait.unite(arrival, ready, flags & FAILED ? 1 : 0);
  }

  private complete(op: number): void {
    const came = this.operations.get(op)!;
    const lane = this.lane(came.lastRank);
    if (!this.certain(came)) return;
    lane.late.unite(came.first, came.last);
    this.changed(came.first);
  }

  /** Whether the last rank came later than the error of the clocks could explain. */
  certain(came: { lead: number; lastRank: number }): boolean {
    const largest = Math.max(0, ...this.clockError.values());
    return came.lead > (this.clockError.get(came.lastRank) ?? 0) + largest;
  }

  /** How much later than the first rank a row's rank came; NaN if no other rank's arrival is known. */
  lateness(lane: Lane, k: number): number {
    const came = this.operations.get(lane.op[k]);
    return came && came.count > 1 ? lane.arrival[k] - came.first : NaN;
  }
}

/** Whether a cell runs on any rank, so that news must come. */
export function runs(store: Store): boolean {
  return store.heading !== STOPPED && store.ranks.some(row => row.state === 'running');
}
