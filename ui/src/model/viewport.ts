import type { Lane, Store } from './store.ts';

const SHORTEST = 200; // ns

/** Which stretch of time is seen, and whether it moves along with what comes. */
export class Viewport {
  from = 0;
  to = 1e9;
  following = true;
  /** How much is seen while following. */
  span = 5e9;
  /** Share of the view that is left free behind the end of what there is. */
  room = 0;
  private begin = 0;
  private end = 0;

  get length(): number {
    return this.to - this.from;
  }

  /** The same as a stretch whose end does not belong to it: what ends with the view, as the newest does while following, is seen. */
  get seen(): [number, number] {
    return [this.from, this.to + 1];
  }

  /** What there is to see; moves the view if it follows. Returns whether it moved. */
  data(begin: number, end: number): boolean {
    this.begin = begin;
    this.end = end;
    if (!this.following) return false;
    return this.toNewest(end - begin < this.span ? end - begin : this.span);
  }

  set(from: number, to: number): boolean {
    if (to - from < SHORTEST) {
      const middle = (from + to) / 2;
      from = middle - SHORTEST / 2;
      to = middle + SHORTEST / 2;
    }
    const moved = from !== this.from || to !== this.to;
    this.from = from;
    this.to = to;
    return moved;
  }

  /** Makes the view `factor` times as long around `at`. */
  zoom(factor: number, at = (this.from + this.to) / 2): void {
    const everything = Math.max(SHORTEST, (this.end - this.begin) * 1.1);
    const length = Math.min(Math.max(this.length * factor, SHORTEST), everything);
    if (this.following) {
      this.span = length * (1 - this.room);
      this.toNewest(this.span);
      return;
    }
    const share = (at - this.from) / this.length;
    this.clamp(at - length * share, length);
  }

  pan(by: number): void {
    this.following = false;
    this.clamp(this.from + by, this.length);
  }

  fit(): void {
    this.following = false;
    const margin = (this.end - this.begin) * 0.01;
    this.set(this.begin - margin, this.end + Math.max(margin, this.behind(this.end - this.begin)));
  }

  toBegin(): void {
    this.show(this.begin, this.begin + this.length);
  }

  toEnd(): void {
    const end = this.end + this.length * this.room;
    this.show(end - this.length, end);
  }

  /** The beginning and the end of what there is. */
  get extent(): [number, number] {
    return [this.begin, this.end];
  }

  show(from: number, to: number): void {
    this.following = false;
    this.set(from, to);
  }

  follow(on: boolean): void {
    this.following = on;
    if (on) {
      this.span = Math.min(Math.max(this.length * (1 - this.room), 1e6), 60e9);
      this.data(this.begin, this.end);
    }
  }

  /** What came last, for a length of time, and the room behind it. */
  private toNewest(length: number): boolean {
    const shown = Math.max(length, SHORTEST);
    return this.set(this.end - shown, this.end + this.behind(shown));
  }

  /** How long the room behind a length of time is. */
  private behind(length: number): number {
    return (length * this.room) / (1 - this.room);
  }

  /** At least a quarter of the view stays over what there is. */
  private clamp(from: number, length: number): void {
    const least = this.begin - length * 0.75;
    const most = this.end - length * 0.25;
    from = Math.min(Math.max(from, least), Math.max(least, most));
    this.set(from, from + length);
  }
}

/** The ranks of one host. */
export interface Group {
  host: string;
  lanes: Lane[];
  collapsed: boolean;
}

/** Which ranks are on which host, and which hosts are collapsed. A rank that has left stays with its last host. */
export class Groups {
  all: Group[] = [];
  /** Grows whenever `all` is another. */
  version = 0;
  private readonly hosts = new Map<number, string>();
  private readonly collapsed = new Set<string>();
  private seen: { ranks: unknown; lanes: number } = { ranks: null, lanes: -1 };

  /** Brings the groups up to date. */
  update(store: Store): void {
    if (this.seen.ranks === store.ranks && this.seen.lanes === store.lanes.length) return;
    this.seen = { ranks: store.ranks, lanes: store.lanes.length };
    let moved = this.all.reduce((sum, group) => sum + group.lanes.length, 0) !== store.lanes.length;
    for (const { rank, host } of store.ranks) {
      if (!host || this.hosts.get(rank) === host) continue;
      this.hosts.set(rank, host);
      moved = true;
    }
    if (moved) this.arrange(store.lanes);
  }

  private arrange(lanes: readonly Lane[]): void {
    const groups = new Map<string, Group>();
    for (const lane of lanes) {
      const host = this.hosts.get(lane.rank) ?? '';
      let group = groups.get(host);
      if (!group) groups.set(host, (group = { host, lanes: [], collapsed: this.collapsed.has(host) }));
      group.lanes.push(lane);
    }
    this.all = [...groups.values()];
    this.version++;
  }

  /** With one host there is nothing to tell apart. */
  get several(): boolean {
    return this.all.length > 1;
  }

  of(lane: Lane): Group | undefined {
    return this.all.find(group => group.lanes.includes(lane));
  }

  toggle(group: Group, collapsed = !group.collapsed): void {
    group.collapsed = collapsed;
    if (collapsed) this.collapsed.add(group.host);
    else this.collapsed.delete(group.host);
    this.version++;
  }

  /** Collapses all hosts, or opens them if all are. */
  toggleAll(): void {
    const collapsed = !this.all.every(group => group.collapsed);
    for (const group of this.all) this.toggle(group, collapsed);
  }
}
