import { FAILED, KINDS, NOT_STARTED, type Store, type Lane } from './store.ts';
import { Track } from './tracks.ts';

/** Statistics of one name and kind. Times in ns. Sizes and sums of times are means of the ranks that have the name. */
export interface NameStatistics {
  name: string;
  /** The line of code, where it is known. */
  site: string;
  kind: string;
  /** Collectives, each once for all of its ranks; of rows without a number each counts. */
  count: number;
  failed: number;
  nbytes: number;
  /** Time in the operations. */
  total: number;
  p50: number;
  p99: number;
  /** Time of waiting for others; of collectives that waited at the same time each counts. */
  wait: number;
  /** Bytes per second of the time in the operations. */
  bandwidth: number;
}

export interface RankStatistics {
  rank: number;
  /** Collectives to which it came last. */
  timesLast: number;
  /** How long others waited for it, for any name where none are chosen; what overlaps counts once. */
  heldUp: number;
  worst: number;
  wait: number;
  work: number;
}

export interface Statistics {
  from: number;
  to: number;
  rows: number;
  operations: number;
  names: NameStatistics[];
  ranks: RankStatistics[];
}

/** What the rows of one name and kind add up to, over all ranks. */
interface Sums {
  operations: Set<number>;
  unnumbered: number;
  ranks: Set<number>;
  failed: number;
  nbytes: number;
  wait: number;
  total: number;
  values: number[];
}

/** The value below which a share of sorted values lies: the nearest one that was measured. */
export function quantile(sorted: Float64Array, share: number): number {
  if (!sorted.length) return NaN;
  return sorted[Math.min(sorted.length - 1, Math.max(0, Math.ceil(share * sorted.length) - 1))];
}

/** Rows of the lane that finish in `[from, to)`: rows lie in the order of their ends. */
export function rowsBetween(lane: Store['lanes'][number], from: number, to: number): [number, number] {
  const ends = (value: number): number => {
    let lo = 0;
    let hi = lane.n;
    while (lo < hi) {
      const middle = (lo + hi) >>> 1;
      if (lane.arrival[middle] + lane.finished[middle] >= value) hi = middle;
      else lo = middle + 1;
    }
    return lo;
  };
  return [ends(from), ends(to)];
}

/** Statistics of all rows that finish in `[from, to)` on the given ranks (by default all) and whose name fits. */
export function statistics(store: Store, from: number, to: number, matches?: Set<number> | null, ranks?: Set<number>): Statistics {
  const found = new Map<number, Sums>();
  const seen = new Set<number>();
  const result: Statistics = { from, to, rows: 0, operations: 0, names: [], ranks: [] };
  for (const lane of store.lanes) {
    if (ranks && !ranks.has(lane.rank)) continue;
    const of: RankStatistics = { rank: lane.rank, timesLast: 0, heldUp: 0, worst: 0, wait: lane.wait.covered(from, to), work: lane.work.covered(from, to) };
    const holding = new Track();
    const [begin, end] = rowsBetween(lane, from, to);
    for (let k = begin; k < end; k++) {
      if (matches && !matches.has(lane.name[k])) continue;
      const key = lane.name[k] * 16 + lane.kind[k];
      let one = found.get(key);
      if (!one) found.set(key, (one = { operations: new Set(), unnumbered: 0, ranks: new Set(), failed: 0, nbytes: 0, wait: 0, total: 0, values: [] }));
      one.ranks.add(lane.rank);
      result.rows++;
      if (lane.flags[k] & FAILED) one.failed++;
      one.wait += lane.ready[k];
      if (!(lane.flags[k] & NOT_STARTED)) {
        const took = lane.finished[k] - lane.started[k];
        one.nbytes += lane.nbytes[k];
        one.total += took;
        one.values.push(took);
      }
      if (lane.op[k]) {
        seen.add(lane.op[k]);
        one.operations.add(lane.op[k]);
      } else {
        result.operations++;
        one.unnumbered++;
      }
      const came = store.operations.get(lane.op[k]);
      if (!came || came.count < 2) continue;
      if (came.lastRank === lane.rank && store.certain(came)) {
        of.timesLast++;
        const held = came.last - came.first;
        // It may have come before the stretch and finished in it.
        if (matches && came.last > from) holding.unite(Math.max(from, came.first), came.last);
        if (held > of.worst) of.worst = held;
      }
    }
    // Without a choice of names the lanes have it already, and both show the same figure.
    of.heldUp = matches ? holding.sum[holding.n] : lane.late.covered(from, to);
    result.ranks.push(of);
  }
  result.operations += seen.size;
  for (const [key, one] of found) {
    const sorted = Float64Array.from(one.values).sort();
    const name = store.names[Math.floor(key / 16)] ?? '';
    result.names.push({
      name,
      site: store.sites[Math.floor(key / 16)] ?? '',
      kind: KINDS[key & 15] ?? '',
      count: one.operations.size + one.unnumbered,
      failed: one.failed,
      nbytes: one.nbytes / one.ranks.size,
      total: one.total / one.ranks.size,
      p50: quantile(sorted, 0.5),
      p99: quantile(sorted, 0.99),
      wait: one.wait / one.ranks.size,
      bandwidth: one.total ? (one.nbytes / one.total) * 1e9 : NaN,
    });
  }
  result.names.sort((a, b) => b.total - a.total);
  return result;
}

/** The next row with one of these names that ends after (or, backwards, before) `time`: its lane and place. */
export function findNext(store: Store, names: Set<number>, time: number, back = false): [rank: number, row: number] | null {
  let best: [number, number] | null = null;
  let at = back ? -Infinity : Infinity;
  for (const lane of store.lanes) {
    const [k] = rowsBetween(lane, time, Infinity);
    for (let i = back ? k - 1 : k; i >= 0 && i < lane.n; i += back ? -1 : 1) {
      const end = lane.arrival[i] + lane.finished[i];
      if (back ? end <= at : end >= at) break;
      if (end === time || !names.has(lane.name[i])) continue;
      best = [lane.rank, i];
      at = end;
      break;
    }
  }
  return best;
}

/** Operations with a tensor whose name was searched for, per lane; made and brought up to date when asked for. */
export class FoundTracks {
  readonly names: Set<number>;
  private readonly known = new Map<Lane, { track: Track; until: number; operation: number }>();

  constructor(names: Set<number>) {
    this.names = names;
  }

  track(lane: Lane): Track {
    let one = this.known.get(lane);
    if (!one) this.known.set(lane, (one = { track: new Track(), until: lane.dropped, operation: -1 }));
    const { work } = lane;
    if (lane.n + lane.dropped === one.until) return one.track;
    if (work.n && one.until <= work.row[0]) one.track.dropBefore(work.start[0]);
    // Rows are numbered; the first operation that may hold a new one is found from the end.
    let i = work.n;
    while (i > 0 && work.row[i - 1] + work.rows[i - 1] > one.until) i--;
    for (; i < work.n; i++) {
      const first = work.row[i];
      if (first === one.operation) continue;
      for (let k = Math.max(0, first - lane.dropped); k < first - lane.dropped + work.rows[i] && k < lane.n; k++) {
        if (!this.names.has(lane.name[k])) continue;
        one.track.push(work.start[i], work.end[i], work.kind[i], first);
        one.operation = first;
        break;
      }
    }
    one.until = lane.n + lane.dropped;
    return one.track;
  }
}

/** Names that contain a text, whatever the case; `null` if it is empty. */
export function search(store: Store, text: string): FoundTracks | null {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return null;
  const found = new Set<number>();
  store.names.forEach((name, i) => {
    if (name.toLowerCase().includes(wanted)) found.add(i);
  });
  return new FoundTracks(found);
}
