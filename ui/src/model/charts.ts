import type { Series, SeriesStore } from './series.ts';
import { runs, type Store } from './store.ts';
import { firstAbove } from './tracks.ts';

/** One chart: a name that all ranks report, or several names that make up a whole. */
export interface Chart {
  /** The name; of shares, what their names begin with. */
  id: string;
  names: string[];
  unit: string;
  /** A line per rank, or shares that are stacked. */
  kind: 'ranks' | 'shares';
  /** Whether the axis begins at 0, and where it ends at least. */
  zero: boolean;
  most: number;
  /** Between points that are further apart than this there is nothing: in ns, or in usual distances of points. */
  gap: { ns: number } | { usual: number };
  /** Whether it was measured at all times, also between cells: then lines go on from one cell to the next. */
  sampled: boolean;
  /** Shown without being asked for. */
  shown: boolean;
}

export const SHARES = 'hvdlab/share/';
const SECOND = 1e9;

// Ours, in the order in which they are shown; what users report comes before all of them.
const ORDER: [start: string, zero: boolean, most: number, shown: boolean][] = [
  ['hvdlab/step_time', true, 0, true],
  ['hvdlab/samples_per_second', true, 0, true],
  [SHARES, true, 1, true],
  ['hvdlab/lateness', true, 0, true],
  ['hvdlab/bandwidth/bus/', true, 0, true],
  ['hvdlab/gradient_norm', true, 0, true],
  ['hvdlab/loss_scale', false, 0, true],
  ['hvdlab/learning_rate', true, 0, true],
  ['hvdlab/gpu', true, 0, true],
  ['hvdlab/cpu', true, 100, true],
  ['hvdlab/rss', true, 0, true],
  ['hvdlab/', true, 0, false],
];

/** Whether a name is of a series that ranks measure all the time, whatever they do. */
export function isSampled(name: string): boolean {
  return /^hvdlab\/(cpu|rss|threads|gpu)/.test(name);
}

/** All charts that there is something for. */
export function chartsOf(store: SeriesStore): Chart[] {
  const found = new Map<string, Chart>();
  for (const [name, series] of store.named) {
    const place = ORDER.find(([start]) => name.startsWith(start));
    const stacked = name.startsWith(SHARES);
    const id = stacked ? SHARES : name;
    const known = found.get(id);
    if (known) {
      known.names.push(name);
      continue;
    }
    const derived = stacked || /^hvdlab\/(lateness|bandwidth)/.test(name);
    found.set(id, {
      id,
      names: [name],
      unit: series[0].unit,
      kind: stacked ? 'shares' : 'ranks',
      zero: place?.[1] ?? false,
      most: series[0].unit === '%' ? 100 : (place?.[2] ?? 0),
      gap: derived ? { ns: 1.5 * SECOND } : place ? { usual: 12 } : { ns: Infinity },
      sampled: isSampled(name),
      shown: place?.[3] ?? true,
    });
  }
  const order = (chart: Chart) => ORDER.findIndex(([start]) => chart.id.startsWith(start));
  return [...found.values()].sort((a, b) => order(a) - order(b) || (order(a) < 0 ? 0 : a.id.localeCompare(b.id)));
}

/** Beyond which distance, in ns, points of these series have nothing between them. */
export function gapOf({ gap }: Chart, series: readonly Series[]): number {
  if ('ns' in gap) return gap.ns;
  let least = Infinity;
  for (const { time, n } of series.slice(0, 8)) {
    const apart = Array.from({ length: Math.min(40, n - 1) }, (_, i) => time[n - 1 - i] - time[n - 2 - i]).sort((a, b) => a - b);
    least = Math.min(least, apart[apart.length >> 1] ?? Infinity);
  }
  return Math.max(3 * SECOND, least * gap.usual);
}

const NO_TIMES = new Float64Array(0);

/** Times at which a rank's lines are interrupted: it died or joined, and where cells begin and end. Made again when marks have changed. */
export class Borders {
  /** Grows with each change. */
  version = 0;
  private seen = -1;
  private key = '';
  private presence = new Map<number, Float64Array>();
  private cells = new Map<number, Float64Array>();

  update(store: Store): void {
    if (this.seen === store.version) return;
    this.seen = store.version;
    const presence = new Map<number, number[]>();
    const cells = new Map<number, number[]>();
    const add = (to: Map<number, number[]>, rank: number, time: number) => to.set(rank, [...(to.get(rank) ?? []), time]);
    for (const { kind, rank, begin, end } of store.marks.values()) {
      if (kind === 'left' || kind === 'joined') {
        add(presence, rank, begin);
        add(cells, rank, begin);
      } else if (kind === 'cell') {
        add(cells, rank, begin);
        if (end !== null) add(cells, rank, end);
      }
    }
    const sorted = (of: Map<number, number[]>) => new Map([...of].map(([rank, times]) => [rank, Float64Array.from(times).sort()]));
    [this.presence, this.cells] = [sorted(presence), sorted(cells)];
    const key = [...this.cells].map(([rank, times]) => `${rank} ${times.length} ${times.at(-1)}`).join();
    if (key === this.key) return;
    this.key = key;
    this.version++;
  }

  /** Of one rank, in order. */
  of(rank: number, sampled: boolean): Float64Array {
    return (sampled ? this.presence : this.cells).get(rank) ?? NO_TIMES;
  }
}

/**
 * The time up to which charts follow: while no cell runs, the last one at which anything happened. Processor and memory
 * are measured when all ranks are idle, too, and would push what was trained out of view.
 */
export function newestEvent(store: Store): number {
  const { series } = store;
  if (runs(store)) return series.end;
  let found = -Infinity;
  for (const one of series.all) if (one.n && !isSampled(one.name)) found = Math.max(found, one.time[one.n - 1]);
  let joined = -Infinity;
  for (const { kind, begin, end } of store.marks.values()) {
    if (kind === 'joined' || kind === 'formed') joined = Math.max(joined, begin);
    else found = Math.max(found, end ?? begin);
  }
  // Ranks that have done nothing yet: there is nothing else to see.
  return Number.isFinite(found) ? Math.max(found, joined) : series.end;
}

/** What uPlot draws: a column of times, and one of values for each line; `undefined` is nothing, `null` a gap. */
export interface Grid {
  x: number[];
  lines: (number | null | undefined)[][];
  low: number;
  high: number;
  /** Times of values that are no numbers or infinite. */
  broken: number[];
  /** The most points that any line has in view. */
  points: number;
}

const NONE = NaN;
const GAP = Infinity;

/** Collects the points of lines in half pixels; where more than two lie in one pixel, the least and the greatest stay. */
class Columns {
  /** Values by place; `NONE` or `GAP` where there is none. */
  readonly lines: Float64Array[];
  readonly used: Uint8Array;
  private readonly first: number;
  readonly pixel: number;
  low = Infinity;
  high = -Infinity;

  constructor(lines: number, from: number, to: number, width: number) {
    this.pixel = (to - from) / width;
    // Pixels are those of the whole axis, so that a view that moves shows the same ones.
    this.first = Math.floor(from / this.pixel);
    this.used = new Uint8Array(2 * (width + 2));
    this.lines = Array.from({ length: lines }, () => new Float64Array(this.used.length).fill(NONE));
  }

  slot(time: number): number {
    const at = Math.floor((time / this.pixel - this.first) * 2);
    return at < 0 ? 0 : at < this.used.length ? at : this.used.length - 1;
  }

  time(slot: number): number {
    return (this.first + (slot + 0.5) / 2) * this.pixel;
  }

  private set(line: number, slot: number, value: number): void {
    this.lines[line][slot] = value;
    this.used[slot] = 1;
  }

  put(line: number, time: number, value: number): void {
    if (value < this.low) this.low = value;
    if (value > this.high) this.high = value;
    const slot = this.slot(time);
    const values = this.lines[line];
    const [left, right] = [slot & ~1, slot | 1];
    const [a, b] = [values[left], values[right]];
    if (!isFinite(a) && !isFinite(b)) this.set(line, slot, value);
    else if (!isFinite(a) || !isFinite(b)) {
      this.set(line, left, isFinite(a) ? a : b);
      this.set(line, right, value);
    } else if (value < Math.min(a, b)) this.set(line, a < b ? left : right, value);
    else if (value > Math.max(a, b)) this.set(line, a > b ? left : right, value);
  }

  gap(line: number, after: number): void {
    const slot = this.slot(after) + 1;
    if (slot >= this.used.length || isFinite(this.lines[line][slot])) return;
    this.lines[line][slot] = GAP;
    this.used[slot] = 1;
  }
}

/** What lines are interrupted by: times of each line's own, and distances that are too long. */
export interface Gaps {
  /** Beyond which distance, in ns, points have nothing between them. */
  longest: number;
  /** Of each line, in order. */
  borders: (rank: number) => Float64Array;
}

/** The points between two times, and the ones next to them, for `width` pixels. */
export function gridOf(series: readonly Series[], from: number, to: number, width: number, gaps: Gaps): Grid {
  const columns = new Columns(series.length, from, to, width);
  const beside: { time: number; line: number; value: number }[] = [];
  const broken: number[] = [];
  let points = 0;
  series.forEach((one, line) => {
    const begin = one.before(from);
    const borders = gaps.borders(one.rank);
    let border = firstAbove(borders, one.time[Math.max(0, begin)] ?? from, 0, borders.length);
    let last = NaN;
    let seen = 0;
    for (let i = Math.max(0, begin); i < one.n; i++) {
      const time = one.time[i];
      const value = one.value[i];
      const inside = time >= from && time <= to;
      if (!Number.isFinite(value)) {
        if (inside) {
          broken.push(time);
          if (last >= from) columns.gap(line, last);
        }
        last = NaN;
      } else {
        while (borders[border] <= last) border++;
        const apart = time - last > gaps.longest || (last < borders[border] && borders[border] <= time);
        if (apart) {
          if (last >= from) columns.gap(line, last);
          else if (beside.at(-1)?.line === line) beside.pop();
        }
        if (inside) {
          columns.put(line, time, value);
          seen++;
        } else if (time < from || !apart) beside.push({ time, line, value });
        last = time;
      }
      if (time > to) break;
    }
    points = Math.max(points, seen);
  });
  return { ...joined(columns, beside), low: columns.low, high: columns.high, broken, points };
}

/** Used columns one after the other, with the points left and right of the view at their own times. */
function joined(columns: Columns, beside: { time: number; line: number; value: number }[]): Pick<Grid, 'x' | 'lines'> {
  const x: number[] = [];
  const lines: Grid['lines'] = columns.lines.map(() => []);
  const extra = (one: (typeof beside)[number]) => {
    x.push(one.time);
    lines.forEach((values, line) => values.push(line === one.line ? one.value : undefined));
  };
  const sorted = beside.sort((a, b) => a.time - b.time);
  const first = columns.time(0);
  let k = 0;
  for (; k < sorted.length && sorted[k].time < first; k++) extra(sorted[k]);
  for (let slot = 0; slot < columns.used.length; slot++) {
    if (!columns.used[slot]) continue;
    const time = columns.time(slot);
    for (; k < sorted.length && sorted[k].time < time; k++) extra(sorted[k]);
    x.push(time);
    lines.forEach((values, line) => {
      const value = columns.lines[line][slot];
      values.push(isFinite(value) ? value : value === GAP ? null : undefined);
    });
  }
  for (; k < sorted.length; k++) extra(sorted[k]);
  return { x, lines: lines.map(widened) };
}

/**
 * A line whose gaps reach from one value to the next. Where another line has a point in a gap, this one has nothing there, and uPlot
 * takes that for the end of the gap.
 */
export function widened(values: Grid['lines'][number]): Grid['lines'][number] {
  const found = [...values];
  let begin = 0;
  let gap = false;
  found.forEach((value, i) => {
    gap ||= value === null;
    if (value == null) return;
    if (gap) found.fill(null, begin, i);
    [begin, gap] = [i + 1, false];
  });
  if (gap) found.fill(null, begin);
  return found;
}

/** The values of a line that have a gap, or nothing, on both sides; `undefined` for all others. */
export function isolated(values: Grid['lines'][number]): Grid['lines'][number] {
  const found: Grid['lines'][number] = values.map(() => undefined);
  let before: number | null = null;
  let last = -1;
  values.forEach((value, i) => {
    if (value === undefined) return;
    if (last >= 0 && before === null && value === null) found[last] = values[last];
    if (value === null) {
      [before, last] = [null, -1];
    } else {
      before = last >= 0 ? values[last]! : null;
      last = i;
    }
  });
  if (last >= 0 && before === null) found[last] = values[last];
  return found;
}

/** The value at place `k` if the first `n` were in order; they are in another order afterwards. */
export function select(values: Float64Array, n: number, k: number): number {
  let low = 0;
  let high = n - 1;
  while (low < high) {
    const pivot = values[(low + high) >> 1];
    let [i, j] = [low, high];
    while (i <= j) {
      while (values[i] < pivot) i++;
      while (values[j] > pivot) j--;
      if (i > j) break;
      const other = values[i];
      values[i++] = values[j];
      values[j--] = other;
    }
    if (k <= j) high = j;
    else if (k >= i) low = i;
    else break;
  }
  return values[k];
}

/**
 * Least, middle and greatest value over many ranks as three lines, one point for each pixel in which a rank has one.
 *
 * Each rank's value counts until its next one, but no longer than to the next gap; of several in a pixel the last one is in the middle.
 */
export function bandOf(series: readonly Series[], from: number, to: number, width: number, gaps: Gaps): Grid {
  const pixel = (to - from) / width;
  const grid: Grid = { x: [], lines: [[], [], []], low: Infinity, high: -Infinity, broken: [], points: 0 };
  const next = Int32Array.from(series, one => Math.max(0, one.before(from)));
  const held = new Float64Array(series.length).fill(NaN);
  const until = new Float64Array(series.length).fill(-Infinity);
  const some = new Float64Array(series.length);
  const borders = series.map(one => gaps.borders(one.rank));
  const border = Int32Array.from(series, (one, s) => firstAbove(borders[s], one.time[next[s]] ?? from, 0, borders[s].length));
  let shown = false;
  const first = Math.floor(from / pixel);
  for (let p = 0; p <= width + 1; p++) {
    const end = (first + p + 1) * pixel;
    let [low, high, fresh, n] = [Infinity, -Infinity, false, 0];
    for (let s = 0; s < series.length; s++) {
      const { time, value, n: count } = series[s];
      let i = next[s];
      for (; i < count && time[i] < end; i++) {
        held[s] = value[i];
        while (borders[s][border[s]] <= time[i]) border[s]++;
        until[s] = Math.min(time[i] + gaps.longest, borders[s][border[s]] ?? Infinity);
        if (time[i] >= from) fresh = true;
        if (!Number.isFinite(value[i])) {
          if (time[i] >= from && time[i] <= to) grid.broken.push(time[i]);
        } else if (value[i] < low) low = value[i];
        if (value[i] > high && Number.isFinite(value[i])) high = value[i];
      }
      next[s] = i;
      if (until[s] >= end - pixel && Number.isFinite(held[s])) some[n++] = held[s];
    }
    if (!fresh && shown === n > 0) continue;
    shown = n > 0;
    grid.x.push(end - pixel / 2);
    for (let k = 0; k < n; k++) [low, high] = [Math.min(low, some[k]), Math.max(high, some[k])];
    grid.lines[1].push(n ? (select(some, n, n >> 1) + (n & 1 ? some[n >> 1] : select(some, n, (n >> 1) - 1))) / 2 : null);
    grid.lines[0].push(n ? low : null);
    grid.lines[2].push(n ? high : null);
    if (n) [grid.low, grid.high] = [Math.min(grid.low, low), Math.max(grid.high, high)];
  }
  return grid;
}

/** Shares of each second as areas on top of each other: means over the ranks, and over seconds that share a pixel. */
export function stackOf(groups: readonly (readonly Series[])[], from: number, to: number, width: number): Grid {
  const per = Math.max(1, Math.ceil(((to - from) / SECOND / width) * 2));
  const blocks = new Map<number, { from: number; to: number; count: number; sums: number[] }>();
  groups.forEach((series, line) => {
    for (const one of series) {
      for (let i = Math.max(0, one.before(from - SECOND)); i < one.n && one.time[i] < to + SECOND; i++) {
        const begin = one.time[i] - SECOND / 2;
        const key = Math.floor(begin / SECOND / per + 1e-6);
        let block = blocks.get(key);
        if (!block) blocks.set(key, (block = { from: begin, to: begin + SECOND, count: 0, sums: groups.map(() => 0) }));
        block.from = Math.min(block.from, begin);
        block.to = Math.max(block.to, begin + SECOND);
        if (!line) block.count++;
        block.sums[line] += one.value[i];
      }
    }
  });
  const x: number[] = [];
  const lines: Grid['lines'] = groups.map(() => []);
  let last = -Infinity;
  for (const block of [...blocks.values()].sort((a, b) => a.from - b.from)) {
    if (block.from > last + SECOND / 1000 && x.length) {
      x.push(last + 1);
      for (const values of lines) values.push(null);
    }
    let sum = 0;
    x.push(Math.max(block.from, last + 1), block.to);
    block.sums.forEach((value, line) => {
      sum += value / Math.max(1, block.count);
      lines[line].push(sum, sum);
    });
    last = block.to;
  }
  return { x, lines, low: 0, high: 1, broken: [], points: 0 };
}

/** How much each area of a stack is of all of them together, over the whole grid; NaN if there is nothing. */
export function partsOf({ x, lines }: Grid): number[] {
  const sums = lines.map((values, line) => {
    let sum = 0;
    for (let i = 1; i < x.length; i += 1) {
      const value = values[i];
      if (value == null || values[i - 1] == null) continue;
      sum += (value - (line ? (lines[line - 1][i] ?? 0) : 0)) * (x[i] - x[i - 1]);
    }
    return sum;
  });
  const whole = sums.reduce((a, b) => a + b, 0);
  return sums.map(sum => sum / whole);
}
