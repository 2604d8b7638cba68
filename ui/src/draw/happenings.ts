import type { Mark } from '../model/store.ts';
import type { Happenings } from '../model/track_events.ts';
import { firstAbove } from '../model/tracks.ts';
import { t } from '../view/texts.ts';
import { AXIS } from './axis.ts';
import { css } from './palette.ts';
import { inPlot, write, type Surface } from './surface.ts';

export const TRACK = 20;
const DRAWN = 400;
const CHARACTER = 6.2; // pixels, at 11 px
const SIGN = 10; // pixels
const SIGNS: Record<Mark['kind'], string> = { cell: '', paused: '', waiting: '', joined: '▲', left: '✕', formed: '◇', abort: '◆' };

/** Height of the tracks of cells and, if anything happened to them, of ranks. */
export function trackHeight(happenings: Happenings): number {
  return TRACK * (happenings.moments.length ? 2 : 1);
}

/** The track of cells: one bar each, over all ranks it ran on. */
export function drawCells(surface: Surface, happenings: Happenings): void {
  const { context: g, palette } = surface;
  const y = AXIS + trackHeight(happenings) - TRACK;
  write(surface, t('cells'), 10, y + TRACK / 2 - 2, css(palette.faint), '11px');
  inPlot(surface, () => {
    for (const cell of happenings.cells.slice(-DRAWN)) {
      const from = Math.max(surface.gutter - 2, surface.x(cell.begin));
      const to = Math.min(surface.width + 2, surface.x(cell.end ?? surface.now));
      if (to < surface.gutter || from > surface.width) continue;
      g.fillStyle = css(cell.ok ? palette.text : palette.late, cell.ok ? 0.1 : 0.3);
      g.beginPath();
      g.roundRect(from, y, Math.max(1, to - from - 1), TRACK - 6, 3);
      g.fill();
      const text = cell.ok ? cell.text : `✕ ${cell.text}`;
      if (to - from > 34) write(surface, text, Math.max(from, surface.gutter) + 7, y + TRACK / 2 - 2.5, css(palette.text), '11px');
    }
  });
}

/** The track of ranks that join, leave or die, and of aborts; each with a line through the lanes. */
export function drawMoments(surface: Surface, happenings: Happenings): void {
  const { moments } = happenings;
  if (!moments.length) return;
  const { context: g, palette } = surface;
  const middle = AXIS + TRACK / 2 - 2;
  write(surface, t('ranks'), 10, middle, css(palette.faint), '11px');
  inPlot(surface, () => {
    const times = Float64Array.from(moments, mark => mark.begin);
    const first = firstAbove(times, surface.view.from, 0, times.length);
    const last = Math.min(firstAbove(times, surface.view.to, first, times.length), first + DRAWN);
    let [free, sign] = [-Infinity, -Infinity];
    for (let i = first; i < last; i++) {
      const mark = moments[i];
      const x = surface.x(mark.begin);
      const calm = mark.kind === 'joined' || mark.kind === 'formed' || mark.ok;
      const colour = calm ? palette.text : palette.late;
      g.strokeStyle = css(colour, calm ? 0.45 : 0.9);
      g.lineWidth = 1;
      g.setLineDash([4, 3]);
      g.beginPath();
      g.moveTo(x, AXIS + TRACK - 4);
      g.lineTo(x, surface.height - 4);
      g.stroke();
      g.setLineDash([]);
      // Signs of what happened at the same time stand beside each other.
      sign = Math.max(x, sign + SIGN);
      write(surface, SIGNS[mark.kind], sign, middle, css(colour), '10px', 'center');
      const room = (i + 1 < last ? surface.x(moments[i + 1].begin) : surface.width) - x - 18;
      const text = shortened(mark.text, Math.floor(room / CHARACTER));
      if (x >= free && text) {
        write(surface, text, sign + 8, middle, css(colour), '11px');
        free = x + 12 + text.length * CHARACTER;
      } else if (i + 1 === last) {
        // The newest is at the right end, and says the most.
        const before = shortened(mark.text, Math.floor((x - Math.max(free, surface.gutter) - 18) / CHARACTER));
        if (before) write(surface, before, x - 8, middle, css(colour), '11px', 'right');
      }
    }
  });
}

function shortened(text: string, characters: number): string {
  if (characters < 6) return '';
  return text.length <= characters ? text : `${text.slice(0, Math.min(80, characters - 1))}…`;
}
