import { grown } from './growing.ts';

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

  /** Forgets what was before `time`; true if so little is left that it is better made anew. */
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
