/**
 * How much room a lane's columns have at first: lanes get rows alike, and what doubles should not do so in all of them
 * in the same frame.
 */
export function roomAtFirst(rank: number): number {
  return 256 + 16 * (rank % 16);
}

/** Grow a typed array to hold at least `size` elements, keeping its content. */
export function grown<T extends Float64Array | Float32Array | Uint32Array | Uint16Array | Uint8Array>(array: T, size: number): T {
  if (array.length >= size) return array;
  const Make = array.constructor as new (length: number) => T;
  const bigger = new Make(Math.max(size, array.length * 2));
  bigger.set(array as never);
  return bigger;
}

const SMALLEST = 2048;
const BINS_PER_INTERVAL = 1;
/** A pixel is made of at least this many bins, or the intervals themselves are looked at. */
const BINS_PER_PIXEL = 4;

/**
 * How much of the time intervals cover, in bins of equal width.
 *
 * There are no more bins than intervals, they are smaller, and they are read in a row: with them, drawing a long time is several times faster.
 */
export class Density {
  private readonly begin: number;
  private width: number;
  private covered = new Float32Array(SMALLEST);
  private longest = new Float32Array(SMALLEST);
  private kind = new Uint8Array(SMALLEST);
  private bins = 0;
  private count = 0;
  private cleared = 0;

  /** For intervals from `begin` on, in bins that are not narrower than `width`. */
  constructor(begin: number, width: number) {
    this.begin = begin;
    this.width = width;
  }

  /** Adds an interval that overlaps no other; false if it begins before all, which there is no room for. */
  add(from: number, to: number, kind: number): boolean {
    if (from < this.begin) return false;
    this.count++;
    const start = from - this.begin;
    const end = to - this.begin;
    this.reserve(end);
    const { width, covered, longest } = this;
    const first = Math.floor(start / width);
    const last = Math.floor(end / width);
    const length = end - start;
    for (let b = first; b <= last; b++) {
      const part = first === last ? length : Math.min(end, (b + 1) * width) - Math.max(start, b * width);
      if (!part && b > first) continue;
      covered[b] += part;
      if (length > longest[b]) {
        longest[b] = length;
        this.kind[b] = kind;
      }
    }
    return true;
  }

  private reserve(end: number): void {
    const most = Math.max(SMALLEST, this.count * BINS_PER_INTERVAL);
    while (end / this.width >= most) this.halve();
    this.bins = Math.max(this.bins, Math.floor(end / this.width) + 1);
    if (this.bins <= this.covered.length) return;
    this.covered = grown(this.covered, this.bins);
    this.longest = grown(this.longest, this.bins);
    this.kind = grown(this.kind, this.bins);
  }

  /** Half as many bins, twice as wide. */
  private halve(): void {
    const { covered, longest, kind } = this;
    const half = (this.bins + 1) >> 1;
    for (let b = 0; b < half; b++) {
      const [left, right] = [2 * b, 2 * b + 1];
      const taken = longest[right] > longest[left] ? right : left;
      covered[b] = covered[left] + covered[right];
      kind[b] = kind[taken];
      longest[b] = longest[taken];
    }
    covered.fill(0, half);
    longest.fill(0, half);
    this.bins = half;
    this.width *= 2;
  }

  /** Forget all before `time`; return whether so little is left that rebuilding is cheaper. */
  clearBefore(time: number): boolean {
    this.covered.fill(0, 0, Math.max(0, Math.floor((time - this.begin) / this.width)));
    this.cleared = Math.max(this.cleared, time - this.begin);
    return this.cleared > (this.bins * this.width) / 2;
  }

  fits(pixel: number): boolean {
    return pixel >= BINS_PER_PIXEL * this.width;
  }

  /**
   * For each of `shares.length` pixels from `from` on, the share that is covered, and the kind of the longest interval
   * there. A bin counts as a whole for the pixel in which it ends.
   */
  read(from: number, pixel: number, shares: Float32Array, kinds: Uint8Array): void {
    const { width, covered, longest, kind, bins } = this;
    const first = (from - this.begin) / width;
    const step = pixel / width;
    let bin = Math.floor(first);
    for (let x = 0; x < shares.length; x++) {
      const next = Math.floor(first + (x + 1) * step);
      let sum = 0;
      let most = -1;
      let what = 0;
      const until = next < bins ? next : bins;
      for (let b = bin < 0 ? 0 : bin; b < until; b++) {
        const here = covered[b];
        if (here === 0) continue;
        sum += here;
        if (longest[b] > most) {
          most = longest[b];
          what = kind[b];
        }
      }
      shares[x] = sum / ((next - bin) * width);
      kinds[x] = what;
      bin = next;
    }
  }
}

const DENSE = 1024;

/** First index in `[lo, hi)` for which `sorted[index] > value`; `hi` if there is none. */
export function firstAbove(sorted: Float64Array, value: number, lo: number, hi: number): number {
  while (lo < hi) {
    const middle = (lo + hi) >>> 1;
    if (sorted[middle] > value) hi = middle;
    else lo = middle + 1;
  }
  return lo;
}

/**
 * Intervals of one lane that don't overlap, in order of time, with the sum of their lengths up to each.
 *
 * The sum tells what share of a pixel is covered without looking at every interval in it.
 */
export class Track {
  n = 0;
  start: Float64Array;
  end: Float64Array;
  sum: Float64Array;
  kind: Uint8Array;
  /** Number of the lane's first row that belongs to the interval, and how many rows do; nothing in tracks of what is only united. */
  row: Float64Array;
  rows: Uint32Array;

  /** Sums of many intervals, once there are many. */
  density: Density | null = null;
  private tried = 0;

  /** With room for so many intervals at first, and with their rows or without. */
  constructor(room = 256, rows = true) {
    [this.start, this.end] = [new Float64Array(room), new Float64Array(room)];
    this.sum = new Float64Array(room + 1);
    this.kind = new Uint8Array(room);
    this.row = new Float64Array(rows ? room : 0);
    this.rows = new Uint32Array(rows ? room : 0);
  }

  /** Adds to the sums what is covered from now on, or begins them. */
  private cover(start: number, end: number, kind: number): void {
    if (this.density) {
      if (!this.density.add(start, end, kind)) this.density = null;
    } else if (this.n >= DENSE && this.n >= this.tried * 1.25) this.begin();
  }

  private begin(): void {
    this.tried = this.n;
    const mean = (this.end[this.n - 1] - this.start[0]) / this.n;
    this.density = new Density(this.start[0], Math.max(1, mean));
    for (let i = 0; i < this.n; i++) this.density.add(this.start[i], this.end[i], this.kind[i]);
  }

  private reserve(size: number): void {
    if (this.start.length >= size) return;
    this.start = grown(this.start, size);
    this.end = grown(this.end, size);
    this.sum = grown(this.sum, this.start.length + 1);
    this.kind = grown(this.kind, size);
    if (!this.rows.length) return;
    this.row = grown(this.row, size);
    this.rows = grown(this.rows, size);
  }

  /** Append an interval after all others, cut where it overlaps the last one; return whether any of it is left. */
  push(start: number, end: number, kind: number, row: number): boolean {
    const last = this.n ? this.end[this.n - 1] : -Infinity;
    const from = start < last ? last : start;
    if (end < from || (end === from && start < last)) return false;
    this.reserve(this.n + 1);
    const i = this.n++;
    this.start[i] = from;
    this.end[i] = end;
    this.kind[i] = kind;
    this.row[i] = row;
    this.rows[i] = 1;
    this.sum[i + 1] = this.sum[i] + (end - from);
    this.cover(from, end, kind);
    return true;
  }

  /** Adds an interval wherever it belongs and joins it with those it touches. */
  unite(start: number, end: number, kind = 0): void {
    const n = this.n;
    // Mostly it belongs at the end.
    let i = n;
    while (i > 0 && this.end[i - 1] >= start) i--;
    let j = i;
    while (j < n && this.start[j] <= end) j++;
    const density = this.density;
    if (density) {
      let at = start;
      let room = true;
      for (let k = i; k < j && room; k++) {
        if (this.start[k] > at) room = density.add(at, this.start[k], kind);
        at = Math.max(at, this.end[k]);
      }
      if (at < end && room) room = density.add(at, end, kind);
      if (!room) this.density = null;
    }
    if (i < j) {
      start = Math.min(start, this.start[i]);
      end = Math.max(end, this.end[j - 1]);
    }
    if (i === j) {
      this.reserve(n + 1);
      for (const a of [this.start, this.end, this.kind]) a.copyWithin(i + 1, i, n);
      this.n = n + 1;
    } else if (j > i + 1) {
      for (const a of [this.start, this.end, this.kind]) a.copyWithin(i + 1, j, n);
      this.n = n - (j - i - 1);
    }
    this.start[i] = start;
    this.end[i] = end;
    this.kind[i] = kind;
    for (let k = i; k < this.n; k++) this.sum[k + 1] = this.sum[k] + (this.end[k] - this.start[k]);
    if (!density && this.n >= DENSE && this.n >= this.tried * 1.25) this.begin();
  }

  /** Forget all intervals that ended before `time`. */
  dropBefore(time: number): void {
    const k = firstAbove(this.end, time, 0, this.n);
    if (!k) return;
    for (const a of [this.start, this.end, this.kind, this.row, this.rows]) a.copyWithin(0, k, this.n);
    this.sum.copyWithin(0, k, this.n + 1);
    this.n -= k;
    if (!this.density?.clearBefore(time)) return;
    this.density = null;
    if (this.n >= DENSE) this.begin();
    else this.tried = 0;
  }

  clear(): void {
    this.n = 0;
    this.sum[0] = 0;
    this.density = null;
    this.tried = 0;
  }

  /** The interval that is nearest to `time` and at most `slack` away, or -1. */
  at(time: number, slack = 0): number {
    const i = firstAbove(this.end, time, 0, this.n);
    if (i < this.n && this.start[i] <= time) return i;
    const after = i < this.n ? this.start[i] - time : Infinity;
    const before = i > 0 ? time - this.end[i - 1] : Infinity;
    if (Math.min(after, before) > slack) return -1;
    return after < before ? i : i - 1;
  }

  /** How much of `[from, to)` is covered. */
  covered(from: number, to: number): number {
    let i = firstAbove(this.end, from, 0, this.n);
    const j = firstAbove(this.start, to, i, this.n);
    if (i >= j) return 0;
    return this.sum[j] - this.sum[i] - Math.max(0, from - this.start[i]) - Math.max(0, this.end[j - 1] - to);
  }
}
