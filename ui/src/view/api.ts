import { statistics, type Statistics } from '../model/statistics.ts';
import type { Store } from '../model/store.ts';
import type { Viewport } from '../model/viewport.ts';
import type { Scene } from './scene.ts';

/** The page's own way to ask what is shown; tests and benchmarks read it. */
export function viewApi<T>(timeline: T, store: Store, view: Viewport, scene: Scene) {
  return {
    store,
    view,
    timeline,
    summary: () => ({ spans: store.count, forgotten: store.forgotten, lost: store.lostBefore, lanes: store.lanes.map(lane => lane.rank), begin: store.begin, end: store.end }),
    statistics: (from = -Infinity, to = Infinity): Statistics => statistics(store, from, to),
    /** Of each collective of a name: who came last and how long after the first, in ns. */
    lateness: (name: string) => {
      const seen = new Map<number, { last: number; ns: number; ranks: number }>();
      for (const lane of store.lanes)
        for (let k = 0; k < lane.n; k++) {
          const came = store.names[lane.name[k]] === name ? store.operations.get(lane.op[k]) : undefined;
          if (came) seen.set(lane.op[k], { last: came.lastRank, ns: came.last - came.first, ranks: came.count });
        }
      return [...seen.entries()].sort((a, b) => a[0] - b[0]).map(([, one]) => one);
    },
    /** Where on the canvas the middle of a rank's lane is at a time. */
    where: (rank: number, time: number) => ({ x: scene.x(time), y: scene.middle(store.lane(rank)) }),
    /** Where the lane begins and how high it is. */
    lane: (rank: number) => scene.place(store.lane(rank)),
    hosts: () => scene.groups.all.map(group => ({ host: group.host, ranks: group.lanes.map(lane => lane.rank), collapsed: group.collapsed })),
  };
}
