import type { Lane } from './lane.ts';
import type { Store } from './store.ts';
import { Track } from './track.ts';

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
