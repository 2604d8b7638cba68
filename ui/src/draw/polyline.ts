import { packed, css, type Rgb } from './palette.ts';

type Values = readonly (number | null | undefined)[];

/** What lines and areas are put together in before they are drawn: pixels of which most are empty. */
export class Layer {
  width = 0;
  height = 0;
  private image: ImageData | null = null;
  private pixels = new Uint8ClampedArray(0);
  private whole = new Uint32Array(0);
  private readonly canvas = typeof document === 'undefined' ? null : document.createElement('canvas');

  /** Clear the layer. */
  clear(width: number, height: number): void {
    if (this.width === width && this.height === height) this.whole.fill(0);
    else {
      [this.width, this.height] = [width, height];
      if (this.canvas) {
        [this.canvas.width, this.canvas.height] = [width, height];
        this.image = new ImageData(width, height);
      }
      this.pixels = this.image?.data ?? new Uint8ClampedArray(4 * width * height);
      this.whole = new Uint32Array(this.pixels.buffer);
    }
  }

  /** Fills a column of pixels from `top` to `bottom`; where it covers a part of a pixel, it is seen that much. */
  column(x: number, top: number, bottom: number, colour: Rgb, alpha: number): void {
    const first = Math.max(0, Math.floor(top));
    const end = Math.min(this.height, Math.ceil(bottom));
    const solid = alpha === 1 ? packed(colour) : 0;
    for (let y = first; y < end; y++) {
      if (solid && y >= top && y + 1 <= bottom) this.whole[y * this.width + x] = solid;
      else this.blend(4 * (y * this.width + x), colour, alpha * (Math.min(y + 1, bottom) - Math.max(y, top)));
    }
  }

  private blend(at: number, colour: Rgb, over: number): void {
    const { pixels } = this;
    const under = (pixels[at + 3] / 255) * (1 - over);
    const sum = over + under;
    for (let part = 0; part < 3; part++) pixels[at + part] = (colour[part] * over + pixels[at + part] * under) / sum;
    pixels[at + 3] = sum * 255;
  }

  /** Opacity of a pixel, 0 to 255. */
  opacity(x: number, y: number): number {
    return this.pixels[4 * (y * this.width + x) + 3];
  }

  draw(g: CanvasRenderingContext2D): void {
    const own = this.canvas?.getContext('2d');
    if (!own || !this.image) return;
    own.putImageData(this.image, 0, 0);
    g.drawImage(own.canvas, 0, 0);
  }
}

/**
 * Draws a line with many points as columns of pixels: to stroke some thousand steep turns takes twenty times as long.
 *
 * @param x, y - Where the points are, in pixels of the canvas, by x; `null` is a gap, `undefined` nothing.
 */
export function fillLine(layer: Layer, x: readonly number[], y: Values, thickness: number, colour: Rgb, alpha = 1): void {
  const { width } = layer;
  const half = thickness / 2;
  let [column, low, high] = [-1, Infinity, -Infinity];
  const flush = () => {
    if (column >= 0 && column < width && low <= high) layer.column(column, low - half, high + half, colour, alpha);
    [low, high] = [Infinity, -Infinity];
  };
  const at = (to: number, value: number) => {
    if (to !== column) {
      flush();
      column = to;
    }
    if (value < low) low = value;
    if (value > high) high = value;
  };
  let [x0, y0] = [NaN, NaN];
  for (let i = 0; i < x.length; i++) {
    const y1 = y[i];
    if (y1 === undefined) continue;
    if (y1 === null) {
      x0 = NaN;
      continue;
    }
    const x1 = x[i];
    if (x0 < x1) {
      const slope = (y1 - y0) / (x1 - x0);
      const last = Math.min(width - 1, Math.floor(x1));
      // Where the line leaves a column, it enters the next one.
      for (let c = Math.max(-1, Math.floor(x0)); c < last; c++) {
        const edge = y0 + slope * (c + 1 - x0);
        at(c, edge);
        at(c + 1, edge);
      }
    }
    at(Math.floor(x1), y1);
    [x0, y0] = [x1, y1];
  }
  flush();
}

/** Fills what is between two lines; each pair of values counts until the next one. `null` is a gap, `undefined` nothing. */
export function fillBetween(layer: Layer, x: readonly number[], above: Values, below: Values, colour: Rgb, alpha: number): void {
  let [begin, top, bottom] = [NaN, 0, 0];
  const until = (end: number) => {
    for (let c = Math.max(0, begin); c < Math.min(layer.width, end); c++) layer.column(c, top, bottom, colour, alpha);
  };
  for (let i = 0; i < x.length; i++) {
    const [a, b] = [above[i], below[i]];
    if (a === undefined || b === undefined) continue;
    const at = Math.floor(x[i]);
    until(at);
    if (a === null || b === null) begin = NaN;
    else [begin, top, bottom] = [at, Math.min(a, b), Math.max(a, b)];
  }
  until(begin + 1);
}

const MOST = 64;

const pictures = new Map<string, HTMLCanvasElement>();

/** A picture of a disc around the middle of a pixel: around a corner a small one looks like a square. */
function picture(colour: Rgb, alpha: number, radius: number): HTMLCanvasElement {
  const style = css(colour, alpha);
  const key = `${style} ${radius}`;
  let made = pictures.get(key);
  if (made) return made;
  if (pictures.size >= MOST) pictures.clear();
  made = document.createElement('canvas');
  const half = Math.ceil(radius) + 0.5;
  made.width = made.height = 2 * half;
  const g = made.getContext('2d')!;
  g.fillStyle = style;
  g.arc(half, half, radius, 0, 2 * Math.PI);
  g.fill();
  pictures.set(key, made);
  return made;
}

/** Draws discs at whole pixels. To copy a picture of one takes a tenth of the time of filling a circle. */
export function drawDots(g: CanvasRenderingContext2D, x: readonly number[], y: readonly (number | null | undefined)[], radius: number, colour: Rgb, alpha: number): void {
  const disc = picture(colour, alpha, radius);
  const half = (disc.width - 1) / 2;
  for (let i = 0; i < x.length; i++) {
    const at = y[i];
    if (at != null) g.drawImage(disc, Math.round(x[i]) - half, Math.round(at) - half);
  }
}
