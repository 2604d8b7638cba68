import { NOT_STARTED, type Lane } from '../model/store.ts';
import type { Place } from './lanes.ts';
import { css } from './palette.ts';
import { inPlot, type Surface } from './surface.ts';

/** A point at which a rank came to a collective; `error` is how far its clock may be off, in ns. */
export interface Arrival {
  time: number;
  y: number;
  size: number;
  error: number;
  last: boolean;
}

/** Frames the span of row `k`. */
export function drawFrame(surface: Surface, lane: Lane, k: number, { y, height }: Place, strong: boolean): void {
  const { context: g, palette } = surface;
  const from = lane.flags[k] & NOT_STARTED ? lane.arrival[k] : lane.arrival[k] + lane.started[k];
  const [left, right] = [surface.x(from), surface.x(lane.arrival[k] + lane.finished[k])];
  inPlot(surface, () => {
    g.lineWidth = strong ? 2 : 1;
    g.strokeStyle = css(palette.selected, strong ? 1 : 0.7);
    g.strokeRect(left, y + 0.5, Math.max(2, right - left), Math.max(1, height - 1));
  });
}

/** Joins the arrivals of all ranks at one collective. */
export function drawArrivals(surface: Surface, points: readonly Arrival[]): void {
  const { context: g, palette } = surface;
  inPlot(surface, () => {
    g.lineWidth = 1.5;
    g.strokeStyle = css(palette.selected, 0.65);
    g.setLineDash([3, 3]);
    g.beginPath();
    points.forEach(({ time, y }, i) => (i ? g.lineTo(surface.x(time), y) : g.moveTo(surface.x(time), y)));
    g.stroke();
    g.setLineDash([]);
    for (const { time, y, size, error, last } of points) {
      const [x, left, right] = [surface.x(time), surface.x(time - error), surface.x(time + error)];
      if (right - left > 3) {
        g.fillStyle = css(palette.selected, 0.8);
        g.fillRect(left, y - 0.75, right - left, 1.5);
        for (const end of [left, right]) g.fillRect(end - 0.75, y - 4, 1.5, 8);
      }
      g.beginPath();
      g.arc(x, y, size, 0, 7);
      g.fillStyle = css(last ? palette.late : palette.background);
      g.strokeStyle = css(last ? palette.background : palette.selected);
      g.fill();
      g.stroke();
    }
  });
}
