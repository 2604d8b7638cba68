import type { Store } from './store.ts';
import type { Track } from './tracks.ts';

const LANES_AT_ONCE = 6;
const EVERY = 400; // ms

/**
 * How all time was spent, in equal steps from the first to the last row: shares of 0 to 1.
 *
 * It is made a few lanes at a time, so that no frame has to wait for it.
 */
export class Overview {
  from = 0;
  to = 0;
  /** Means over all ranks of being in collectives and of waiting; and the share of time in which a rank was waited for. */
  work = new Float32Array(0);
  wait = new Float32Array(0);
  late = new Float32Array(0);
  private making: { from: number; to: number; lane: number; version: number; work: Float32Array; wait: Float32Array; late: Float32Array } | null = null;
  private version = -1;
  private cleared = 0;
  private begun = -Infinity;

  /** Do a part of the pending work; return whether the numbers changed. `now` in ms. */
  step(store: Store, steps: number, now: number): boolean {
    if (this.cleared !== store.cleared) {
      this.cleared = store.cleared;
      this.making = null;
      for (const shares of [this.work, this.wait, this.late]) shares.fill(0);
      return true;
    }
    if (!this.making) {
      if (this.version === store.version && this.work.length === steps) return false;
      if ((now - this.begun < EVERY && this.work.length === steps) || !store.count || steps < 1) return false;
      this.begun = now;
      const zeros = () => new Float32Array(steps);
      this.making = { from: store.begin, to: Math.max(store.end, store.begin + 1), lane: 0, version: store.version, work: zeros(), wait: zeros(), late: zeros() };
    }
    const { making } = this;
    const pixel = (making.to - making.from) / making.work.length;
    for (const lane of store.lanes.slice(making.lane, making.lane + LANES_AT_ONCE)) {
      addCoverage(lane.work, making.from, pixel, making.work);
      addCoverage(lane.wait, making.from, pixel, making.wait);
      addCoverage(lane.late, making.from, pixel, making.late);
    }
    making.lane += LANES_AT_ONCE;
    if (making.lane < store.lanes.length) return false;
    const share = 1 / store.lanes.length;
    for (let x = 0; x < making.work.length; x++) {
      making.work[x] *= share;
      making.wait[x] *= share;
      making.late[x] = Math.min(1, making.late[x]);
    }
    Object.assign(this, { from: making.from, to: making.to, work: making.work, wait: making.wait, late: making.late, version: making.version });
    this.making = null;
    return true;
  }

  /** Whether a part was done and others are not. */
  get busy(): boolean {
    return this.making !== null;
  }

  /** Whether there are rows that are not in it. */
  behind(store: Store, steps: number): boolean {
    return this.busy || this.version !== store.version || this.work.length !== steps;
  }
}

let shares = new Float32Array(0);
let kinds = new Uint8Array(0);

/** Adds which share of each of `sums.length` pixels from `from` on a track covers. */
export function addCoverage(track: Track, from: number, pixel: number, sums: Float32Array): void {
  const { density, start, end, n } = track;
  const width = sums.length;
  if (density?.fits(pixel)) {
    if (shares.length !== width) {
      shares = new Float32Array(width);
      kinds = new Uint8Array(width);
    }
    density.read(from, pixel, shares, kinds);
    for (let x = 0; x < width; x++) sums[x] += shares[x];
    return;
  }
  for (let i = 0; i < n; i++) {
    const left = Math.max(0, (start[i] - from) / pixel);
    const right = Math.min(width, (end[i] - from) / pixel);
    if (right <= left) continue;
    const first = Math.floor(left);
    const last = Math.min(width - 1, Math.floor(right));
    if (first === last) {
      sums[first] += right - left;
      continue;
    }
    sums[first] += first + 1 - left;
    for (let x = first + 1; x < last; x++) sums[x] += 1;
    sums[last] += right - last;
  }
}
