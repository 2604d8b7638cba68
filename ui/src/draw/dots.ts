import { css, type Rgb } from './palette.ts';

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
