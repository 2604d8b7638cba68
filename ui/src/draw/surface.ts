import type { Lane, Store } from '../model/store.ts';
import type { Palette } from './palette.ts';

export const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

/** What parts of the picture draw on. Pixels are those of the page; times are ns. */
export interface Surface {
  readonly context: CanvasRenderingContext2D;
  readonly store: Store;
  readonly palette: Palette;
  readonly view: { readonly from: number; readonly to: number };
  /** Labels are left of it, time is right of it. */
  readonly gutter: number;
  /** Lanes are below it. */
  readonly top: number;
  readonly width: number;
  readonly height: number;
  readonly plotWidth: number;
  /** The last time of what there is: where cells that run end. */
  readonly now: number;
  /** The stretch of time that the figures in the labels are of: the chosen one, or else that in view. */
  readonly told: readonly [from: number, to: number];
  /** The rank that slows the others down in that stretch, if one does. */
  readonly slowest: Lane | null;
  x(time: number): number;
}

/** Writes a line with its middle at `y`; it is made narrower if it is wider than `most` pixels. */
export function write(surface: Surface, text: string, x: number, y: number, colour: string, font: string, align: CanvasTextAlign = 'left', most?: number): void {
  const g = surface.context;
  g.font = `${font} ${FONT}`;
  g.textAlign = align;
  g.textBaseline = 'middle';
  g.fillStyle = colour;
  g.fillText(text, x, y, most);
}

/** Draws with everything left of the gutter cut off. */
export function inPlot(surface: Surface, draw: () => void): void {
  const g = surface.context;
  g.save();
  g.beginPath();
  g.rect(surface.gutter, 0, surface.plotWidth, surface.height);
  g.clip();
  draw();
  g.restore();
}
