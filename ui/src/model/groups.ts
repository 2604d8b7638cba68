import type { Lane } from './lane.ts';
import type { Store } from './store.ts';

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
