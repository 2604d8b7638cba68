import { rowsBetween } from '../model/statistics.ts';
import type { Lane, Store } from '../model/store.ts';

const LOOKED_AT = 512;

/** What lies under a point: rows of one lane, and which part of them. */
export interface Hit {
  lane: Lane;
  /** Number of the first row since the beginning of the lane, and how many there are (fused tensors). */
  row: number;
  rows: number;
  part: 'work' | 'wait' | 'late';
}

export function indexOf(hit: Hit): number {
  return hit.row - hit.lane.dropped;
}

/** What a lane shows at a time, at most `slack` away. */
export function hitTest(store: Store, lane: Lane, time: number, slack: number): Hit | null {
  const { work } = lane;
  const inside = work.at(time, 0);
  if (inside >= 0) return { lane, row: work.row[inside], rows: work.rows[inside], part: 'work' };
  const [from] = rowsBetween(lane, time, Infinity);
  const until = Math.min(lane.n, from + LOOKED_AT);
  let late: Hit | null = null;
  for (let k = from; k < until; k++) {
    if (lane.arrival[k] <= time) return { lane, row: lane.dropped + k, rows: 1, part: 'wait' };
    const came = late ? undefined : store.operations.get(lane.op[k]);
    if (came && came.lastRank === lane.rank && came.first <= time && time <= came.last && store.certain(came))
      late = { lane, row: lane.dropped + k, rows: 1, part: 'late' };
  }
  if (late) return late;
  const near = work.at(time, slack);
  return near >= 0 ? { lane, row: work.row[near], rows: work.rows[near], part: 'work' } : null;
}

/** The rows of an operation on all lanes that still have them: index by rank. */
export function rowsOf(store: Store, op: number): Map<number, number> {
  const found = new Map<number, number>();
  const came = store.operations.get(op);
  if (!came) return found;
  for (const lane of store.lanes) {
    // On every rank it ends after the last one came; clocks may differ by a little.
    const [from] = rowsBetween(lane, came.last - 1e6, Infinity);
    const until = Math.min(lane.n, from + LOOKED_AT * 4);
    for (let k = from; k < until; k++)
      if (lane.op[k] === op) {
        found.set(lane.rank, k);
        break;
      }
  }
  return found;
}
