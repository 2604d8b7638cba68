import type { Lane } from '../model/store.ts';
import type { Track } from '../model/tracks.ts';
import { paintTrack, type Scale } from './paint.ts';
import { mixed, packed, type Palette } from './palette.ts';

/** The rows of pixels of a lane: the first, how many, and how many of them on top show in full colour who was late. */
export interface Strip {
  lane: Lane;
  row: number;
  rows: number;
  late: number;
}

/** Where all lanes lie; another object whenever one of them moves. What no strip covers is background. */
export interface Strips {
  readonly strips: readonly Strip[];
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
 * comes into sight or has changed is drawn anew.
 */
export class Raster {
  private image: ImageData | null = null;
  private pixels = new Uint32Array(0);
  private inks: Inks | null = null;
  private before: { palette: Palette; found: Found | null; where: Strips; scale: number; at: number } | null = null;

  /** Draws `where` at `x`, `y`; nothing before the time `changed` is other than it was at the last call. */
  paint(context: CanvasRenderingContext2D, where: Strips, view: Scale, x: number, y: number, palette: Palette, found: Found | null, changed: number): void {
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
  private columns(where: Strips, view: Scale, x: number, found: Found | null, dark: boolean): void {
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
