import { firstAbove, type Density, type Track } from '../model/tracks.ts';

const ONE_BY_ONE = 48;

/** First index from `from` on whose start is at least `time`, by steps that double. */
function nextStart(start: Float64Array, time: number, from: number, n: number): number {
  let step = ONE_BY_ONE;
  let low = from;
  while (low + step < n && start[low + step] < time) {
    low += step;
    step <<= 1;
  }
  let high = Math.min(low + step, n);
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (start[middle] >= time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function blend(under: number, over: number, share: number): number {
  const rest = 1 - share;
  const red = (over & 255) * share + (under & 255) * rest;
  const green = ((over >>> 8) & 255) * share + ((under >>> 8) & 255) * rest;
  const blue = ((over >>> 16) & 255) * share + ((under >>> 16) & 255) * rest;
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/** Which pixels show which time: pixel `x` shows `[from + x / scale, from + (x + 1) / scale)`. */
export interface Scale {
  from: number;
  to: number;
  scale: number;
  width: number;
}

let shares = new Float32Array(0);
let kinds = new Uint8Array(0);

function paintDensity(out: Uint32Array, density: Density, view: Scale, colours: Uint32Array, opacity: number, least: number): void {
  if (shares.length !== view.width) {
    shares = new Float32Array(view.width);
    kinds = new Uint8Array(view.width);
  }
  density.read(view.from, 1 / view.scale, shares, kinds);
  for (let x = 0; x < shares.length; x++) {
    const share = shares[x];
    if (!share) continue;
    out[x] = blend(out[x], colours[kinds[x]], (least + (1 - least) * (share < 1 ? share : 1)) * opacity);
  }
}

/**
 * Draws a track into one row of pixels.
 *
 * What is wider than a pixel is drawn with both its ends. What is not is drawn together: the share of the pixel that is
 * covered as opacity, in the colour of the longest among (some of) the intervals in it.
 */
export function paintTrack(out: Uint32Array, track: Track, view: Scale, colours: Uint32Array, opacity: number, least: number): void {
  const { from, to, scale, width } = view;
  const { start, end, sum, kind, n, density } = track;
  const pixel = 1 / scale;
  if (density?.fits(pixel)) {
    paintDensity(out, density, view, colours, opacity, least);
    return;
  }
  let i = firstAbove(end, from, 0, n);
  while (i < n) {
    const begin = start[i];
    if (begin >= to) break;
    const left = (begin - from) * scale;
    let longest = end[i] - begin;
    const x = left < 0 ? 0 : left | 0;
    if (longest >= pixel) {
      const until = Math.min(width, Math.max(x + 1, Math.round((end[i] - from) * scale)));
      const colour = colours[kind[i]];
      if (opacity >= 1) out.fill(colour, x, until);
      else for (let k = x; k < until; k++) out[k] = blend(out[k], colour, opacity);
      i++;
      continue;
    }
    const next = from + (x + 1) * pixel;
    let best = i;
    let j = i + 1;
    const near = Math.min(n, j + ONE_BY_ONE);
    while (j < near && start[j] < next) {
      const length = end[j] - start[j];
      if (length > longest) {
        longest = length;
        best = j;
      }
      j++;
    }
    if (j === near && j < n && start[j] < next) {
      const first = j;
      j = nextStart(start, next, j, n);
      const stride = Math.max(1, (j - first) >> 3);
      for (let k = first; k < j; k += stride) {
        const length = end[k] - start[k];
        if (length > longest) {
          longest = length;
          best = k;
        }
      }
    }
    const covered = (sum[j] - sum[i]) * scale;
    const share = (least + (1 - least) * (covered < 1 ? covered : 1)) * opacity;
    if (x < width) out[x] = blend(out[x], colours[kind[best]], share);
    i = j;
  }
}
