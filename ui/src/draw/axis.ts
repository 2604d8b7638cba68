import { count, duration, ticks } from './format.ts';
import { css } from './palette.ts';
import { write, type Surface } from './surface.ts';
import { t } from '../view/texts.ts';

/** Height of the axis. */
export const AXIS = 24;

/** The time axis, with lines through the lanes. */
export function drawAxis(surface: Surface): void {
  const { context: g, palette, view } = surface;
  for (const tick of ticks(view.from, view.to, surface.plotWidth)) {
    const x = Math.round(surface.x(tick.at)) + 0.5;
    g.fillStyle = css(palette.text, 0.09);
    g.fillRect(x, AXIS - 5, 1, surface.height - AXIS);
    if (x < surface.gutter + 24 || x > surface.width - 24) continue;
    write(surface, tick.text, x, AXIS / 2 - 1, css(palette.faint), '11px', 'center');
  }
}

/** Where the oldest rows were dropped, and how many. */
export function drawDropped(surface: Surface, gone: number): void {
  const { context: g, palette, store } = surface;
  const x = Math.min(surface.width, surface.x(store.begin));
  if (!gone || !(x > surface.gutter)) return;
  g.save();
  g.beginPath();
  g.rect(surface.gutter, AXIS - 2, x - surface.gutter, surface.height - AXIS - 2);
  g.clip();
  g.strokeStyle = css(palette.faint, 0.3);
  g.lineWidth = 1;
  g.beginPath();
  for (let left = surface.gutter - surface.height; left < x; left += 9) {
    g.moveTo(left, surface.height);
    g.lineTo(left + surface.height, 0);
  }
  g.stroke();
  g.restore();
  const text = t('%1 spans dropped', count(gone));
  if (x - surface.gutter < text.length * 7) return;
  g.fillStyle = css(palette.background);
  g.fillRect(x - text.length * 6.6 - 10, surface.top + 4, text.length * 6.6 + 4, 18);
  write(surface, text, x - 8, surface.top + 13, css(palette.faint), '11px', 'right');
}

/** A stretch of time that is chosen: what is beside it is dimmed. */
export function drawChosen(surface: Surface, from: number, to: number): void {
  const { context: g, palette, gutter, width } = surface;
  const [begin, end] = [surface.x(from), surface.x(to)];
  const inside = (x: number) => Math.max(gutter, Math.min(width, x));
  g.fillStyle = css(palette.background, 0.55);
  g.fillRect(gutter, AXIS, inside(begin) - gutter, surface.height - AXIS);
  g.fillRect(inside(end), AXIS, width - inside(end), surface.height - AXIS);
  const [left, right] = [Math.max(gutter, begin), Math.min(width, end)];
  if (right < gutter || left > width) return;
  g.fillStyle = css(palette.text, 0.8);
  if (begin >= gutter) g.fillRect(begin, AXIS - 6, 1, surface.height);
  if (end <= width + 0.5) g.fillRect(end - 1, AXIS - 6, 1, surface.height);
  g.fillRect(left, AXIS - 6, Math.max(1, right - left), 2);
  if (right - left <= 60) return;
  const text = duration(to - from);
  const room = text.length * 6.4 + 8;
  const middle = Math.max(gutter + room / 2, Math.min(width - room / 2, (left + right) / 2));
  g.fillStyle = css(palette.background, 0.9);
  g.fillRect(middle - room / 2, 0, room, AXIS - 7);
  write(surface, text, middle, AXIS / 2 - 2, css(palette.text), '600 11px', 'center');
}
