import type { Lane } from '../model/store.ts';
import { firstAbove, type Density, type Track } from '../model/tracks.ts';
import { mixed, packed, type Palette } from './palette.ts';

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

/** The rows of pixels of a lane: the first, how many, and how many of them on top show in full colour which rank was late. */
export interface LaneRows {
  lane: Lane;
  row: number;
  rows: number;
  late: number;
}

/** Where all lanes lie; another object whenever one of them moves. What no strip covers is background. */
export interface LaneLayout {
  readonly strips: readonly LaneRows[];
  readonly rows: number;
}

/** What a search has found, as tracks of their own. */
export interface Found {
  track(lane: Lane): Track;
}

/** Colours as the pixels have them. */
class Inks {
  readonly kinds = new Uint32Array(256);
  readonly waits: Uint32Array;
  readonly lates: Uint32Array;
  readonly background: number;
  readonly lane: number;

  constructor(palette: Palette) {
    palette.kinds.forEach((colour, i) => {
      this.kinds[i] = packed(colour);
      this.kinds[i | 128] = packed(mixed(palette.failed, colour, 0.72));
    });
    this.waits = Uint32Array.of(packed(palette.wait), packed(mixed(palette.failed, palette.wait, 0.35)));
    this.lates = Uint32Array.of(packed(palette.late));
    this.background = packed(palette.background);
    this.lane = packed(palette.lane);
  }
}

/**
 * Draws all lanes into an image, each row of pixels once per lane.
 *
 * The view is drawn at whole pixels of the time axis, so that what was drawn can be moved when the view moves, and only what
 * comes into sight or has changed is drawn again.
 */
export class Raster {
  private image: ImageData | null = null;
  private pixels = new Uint32Array(0);
  private inks: Inks | null = null;
  private before: { palette: Palette; found: Found | null; where: LaneLayout; scale: number; at: number } | null = null;

  /** Draws `where` at `x`, `y`; nothing before the time `changed` is other than it was at the last call. */
  paint(context: CanvasRenderingContext2D, where: LaneLayout, view: Scale, x: number, y: number, palette: Palette, found: Found | null, changed: number): void {
    const { width } = view;
    if (width < 1 || where.rows < 1) return;
    const before = this.before;
    const sameImage = this.image?.width === width && this.image.height === where.rows;
    if (!sameImage) {
      this.image = context.createImageData(width, where.rows);
      this.pixels = new Uint32Array(this.image.data.buffer);
    }
    if (before?.palette !== palette || !this.inks) this.inks = new Inks(palette);
    const still = sameImage && before && before.palette === palette && before.found === found && before.where === where;
    const scale = still && Math.abs(before.scale / view.scale - 1) < 1e-9 ? before.scale : view.scale;
    const at = Math.round(view.from * scale);
    this.before = { palette, found, where, scale, at };
    const columns = (from: number, to: number) => {
      if (from < to) this.columns(where, { from: (at + from) / scale, to: (at + to) / scale, scale, width: to - from }, from, found, palette.dark);
    };
    const shift = still && scale === before.scale ? at - before.at : width;
    if (Math.abs(shift) >= width) columns(0, width);
    else {
      const end = Math.min(width, Math.max(0, Math.floor(changed * scale) - at - 1));
      if (shift > 0) this.pixels.copyWithin(0, shift);
      else if (shift < 0) this.pixels.copyWithin(-shift, 0, this.pixels.length + shift);
      if (shift < 0) columns(0, Math.min(-shift, end));
      columns(shift > 0 ? Math.min(width - shift, end) : end, width);
    }
    context.putImageData(this.image!, x, y);
  }

  /** Draws some columns of all lanes. */
  private columns(where: LaneLayout, view: Scale, x: number, found: Found | null, dark: boolean): void {
    const { pixels, inks } = this;
    if (!inks) return;
    const stride = this.image!.width;
    const body = new Uint32Array(view.width);
    const late = new Uint32Array(view.width);
    let done = 0;
    const leaveFree = (until: number) => {
      for (; done < until; done++) pixels.fill(inks.background, done * stride + x, done * stride + x + view.width);
    };
    for (const { lane, row, rows, late: top } of where.strips) {
      body.fill(inks.lane);
      paintTrack(body, lane.wait, view, inks.waits, found ? 0.4 : 1, 0.1);
      paintTrack(body, lane.late, view, inks.lates, dark ? 0.42 : 0.34, 0.1);
      paintTrack(body, lane.work, view, inks.kinds, found ? 0.2 : 1, 0.3);
      if (found) paintTrack(body, found.track(lane), view, inks.kinds, 1, 0.5);
      leaveFree(row);
      done = row + rows;
      let at = row * stride + x;
      if (top) {
        late.set(body);
        paintTrack(late, lane.late, view, inks.lates, 1, 0.3);
        for (let k = 0; k < top; k++, at += stride) pixels.set(late, at);
      }
      for (const end = done * stride + x; at < end; at += stride) pixels.set(body, at);
    }
    leaveFree(where.rows);
  }
}
