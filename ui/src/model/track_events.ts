import type { Mark, Store } from './store.ts';

/** A cell as it ran on all its ranks; `end` is `null` while it runs on one of them. */
export interface Cell {
  text: string;
  begin: number;
  end: number | null;
  ok: boolean;
  ranks: number[];
}

/** Stretch that is drawn in a rank's lane. */
const STRETCHES = new Set<Mark['kind']>(['paused', 'waiting']);
/** The same label after this time (ns) is another cell: a kernel that was started again counts from one. */
const APART = 1e9;

/** Cells, and ranks that joined and left, derived from the store's marks when these have changed. */
export class TrackEvents {
  cells: Cell[] = [];
  /** Ranks that joined or left, generations of other ranks, and aborts, in order of time. */
  moments: Mark[] = [];
  /** When each rank was not there, as far as it was seen. */
  absent = new Map<number, [from: number, to: number][]>();
  /** When each rank waited for its user, or to be let in. */
  paused = new Map<number, Mark[]>();
  private version = -1;

  update(store: Store): void {
    if (this.version === store.version) return;
    this.version = store.version;
    const marks = [...store.marks.values()];
    this.cells = cells(marks);
    this.paused.clear();
    for (const mark of marks) if (STRETCHES.has(mark.kind)) this.paused.set(mark.rank, [...(this.paused.get(mark.rank) ?? []), mark]);
    this.moments = marks.filter(mark => mark.kind !== 'cell' && !STRETCHES.has(mark.kind)).sort((a, b) => a.begin - b.begin);
    this.absent = absences(this.moments);
  }

  /** The cell that ran at a time; of several the last that began. */
  cellAt(time: number, slack: number, now: number): Cell | null {
    for (let i = this.cells.length - 1; i >= 0; i--) {
      const cell = this.cells[i];
      if (cell.begin - slack <= time && time <= (cell.end ?? now) + slack) return cell;
    }
    return null;
  }
}

/** Least stretch of a cell that a timeline without rows shows, in ns. */
const LEAST_OF_CELL = 1e8;

/**
 * Return the first and the last time that a timeline shows; `null` before the first event.
 *
 * Rows and cells belong to it, and so do deaths and aborts up to `reach` (ns) after them: what happens to idle ranks later does not
 * push away what they did. A cell that runs and has no rows yet reaches to the last time at which anything was measured.
 */
export function extentOf(store: Store, { cells, moments }: TrackEvents, reach: number): [begin: number, end: number] | null {
  if (!store.count && !cells.length) return null;
  const begin = store.count ? store.begin : cells[0].begin;
  let end = store.count ? store.end : begin + LEAST_OF_CELL;
  for (const cell of cells) {
    if (cell.end !== null) end = Math.max(end, cell.end);
    else if (cell.begin > store.end) end = Math.max(end, cell.begin + LEAST_OF_CELL, store.series.end);
  }
  const last = end;
  for (const { begin: at } of moments) if (at > end && at <= last + reach) end = at;
  return [begin, end];
}

function cells(marks: readonly Mark[]): Cell[] {
  const newest = new Map<string, Cell>();
  const all: Cell[] = [];
  // A rank's death ends its part; the ranks that are left report whether the cell fails by it.
  const deaths = new Set(marks.filter(mark => mark.kind === 'left').map(mark => `${mark.rank} ${mark.begin}`));
  const isDeath = (mark: Mark) => mark.end !== null && deaths.has(`${mark.rank} ${mark.end}`);
  for (const mark of marks.filter(one => one.kind === 'cell').sort((a, b) => a.begin - b.begin)) {
    const one = newest.get(mark.text);
    if (!one || (one.end !== null && mark.begin > one.end + APART)) {
      const cell = { text: mark.text, begin: mark.begin, end: mark.end, ok: mark.ok || isDeath(mark), ranks: [mark.rank] };
      newest.set(mark.text, cell);
      all.push(cell);
      continue;
    }
    one.end = one.end === null || mark.end === null ? null : Math.max(one.end, mark.end);
    one.ok &&= mark.ok || isDeath(mark);
    if (!one.ranks.includes(mark.rank)) one.ranks.push(mark.rank);
  }
  for (const cell of all) {
    cell.ranks.sort((a, b) => a - b);
    // All of its ranks have died.
    cell.ok &&= cell.end === null || marks.some(mark => mark.kind === 'cell' && mark.text === cell.text && mark.ok && mark.begin >= cell.begin && mark.end !== null && mark.end <= cell.end!);
  }
  return all;
}

function absences(moments: readonly Mark[]): Map<number, [number, number][]> {
  const found = new Map<number, [number, number][]>();
  for (const { kind, rank, begin } of moments) {
    const here = found.get(rank) ?? [];
    const last = here.at(-1);
    if (kind === 'left') found.set(rank, [...here, [begin, Infinity]]);
    else if (kind === 'joined' && last?.[1] === Infinity) last[1] = begin;
  }
  return found;
}
