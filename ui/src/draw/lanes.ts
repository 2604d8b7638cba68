import { KINDS, type Lane, type Mark } from '../model/store.ts';
import { firstAbove } from '../model/tracks.ts';
import type { Group } from '../model/viewport.ts';
import { t } from '../view/texts.ts';
import { duration, percent, ranks } from './format.ts';
import { css, type Rgb } from './palette.ts';
import { inPlot, write, type Surface } from './surface.ts';

const SPANS_NAMED = 1500;
const LATE_MARKED = 300;
const CHARACTER = 6.3;

/** Where a lane lies on the surface. */
export interface Place {
  y: number;
  height: number;
}

/** How long others waited for this lane's rank in the stretch that labels tell of, as text; empty if they did not. */
function waitsFor(surface: Surface, lanes: readonly Lane[]): string {
  const held = lanes.reduce((sum, lane) => sum + lane.late.covered(...surface.told), 0);
  return held ? t('others waited %1', duration(held)) : '';
}

/** Whether a lane so low that only some can have names is one of them: not so near to its host's line that they'd overlap. */
function named(pitch: number, [index, all]: readonly [number, number], hosts: boolean): boolean {
  const every = Math.ceil(11 / pitch);
  if (!hosts) return index % every === 0;
  const middle = (index + 0.5) * pitch;
  return index % every === every >> 1 && middle >= 5 && middle <= all * pitch - 4;
}

/** The name of a rank, and how long others waited for it. `place` says which of how many lanes of its host it is. */
export function drawLabel(surface: Surface, lane: Lane, { y, height }: Place, pitch: number, indent: number, place: readonly [number, number]): void {
  const { palette, gutter } = surface;
  if (pitch < 9 && !named(pitch, place, indent > 0)) return;
  const slow = surface.slowest === lane;
  const wide = gutter > 80;
  const middle = y + height / 2;
  const left = 10 + (wide ? indent : 0);
  const name = wide || pitch < 9 ? t('rank %1', lane.rank) : `${lane.rank}`;
  const told = surface.store.ranks.find(one => one.rank === lane.rank);
  const paused = told?.paused;
  const lost = told?.state === 'lost';
  const second = height < 27 || !wide ? '' : lost ? `✕ ${t('lost')}` : paused ? `❚❚ ${t(paused)}` : waitsFor(surface, [lane]);
  write(surface, name, left, second ? middle - 7 : middle, css(slow ? palette.late : palette.text), `${slow ? 700 : 600} ${pitch >= 16 ? 12 : 9.5}px`);
  if (second) {
    const colour = lost ? palette.late : paused ? palette.text : palette.faint;
    write(surface, second, left, middle + 8, css(colour), lost || paused ? '600 11px' : '11px', 'left', gutter - left - 5);
  } else if (lost && pitch >= 14) write(surface, '✕', gutter - 8, middle, css(palette.late), '600 11px', 'right');
  else if (paused && pitch >= 14) write(surface, '❚❚', gutter - 8, middle, css(palette.text), '9px', 'right');
  else if (pitch >= 14 && wide && slow) write(surface, percent(lane.late.covered(...surface.told) / (surface.told[1] - surface.told[0])), gutter - 8, middle, css(palette.late), '600 11px', 'right');
}

/** The line above the lanes of a host. */
export function drawHeading(surface: Surface, group: Group, { y, height }: Place): void {
  const { context: g, palette, gutter, width } = surface;
  const middle = y + height / 2;
  g.fillStyle = css(palette.text, 0.16);
  g.fillRect(0, y + height - 2, width, 1);
  const name = group.host || t('host not known');
  const slow = surface.slowest !== null && group.lanes.includes(surface.slowest);
  write(surface, group.collapsed ? '▸' : '▾', 9, middle, css(palette.faint), '10px');
  write(surface, name, 21, middle, css(slow && group.collapsed ? palette.late : palette.text), '600 11.5px');
  const text = [ranks(group.lanes.map(lane => lane.rank)), waitsFor(surface, group.lanes)].filter(Boolean).join(' · ');
  write(surface, text, Math.max(gutter + 6, name.length * 7 + 34), middle, css(palette.faint), '11px');
}

/** The names on spans that are wide enough. */
export function drawNames(surface: Surface, lane: Lane, { y, height }: Place, bar: number): void {
  const { context: g, palette, store, view } = surface;
  const { work } = lane;
  const from = firstAbove(work.end, view.from, 0, work.n);
  const to = firstAbove(work.start, view.to, from, work.n);
  if (to - from > SPANS_NAMED) return;
  const middle = y + (height + bar) / 2;
  for (let i = from; i < to; i++) {
    const left = Math.max(surface.gutter, surface.x(work.start[i]));
    const right = Math.min(surface.width, surface.x(work.end[i]));
    const room = right - left - 12;
    if (room < 30) continue;
    const k = work.row[i] - lane.dropped;
    const kind = work.kind[i] & 127;
    const colour = palette.kinds[kind];
    const bright = (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) / 255 > 0.5;
    const name = (store.names[lane.name[k]] || KINDS[kind]) + (work.rows[i] > 1 ? ` +${work.rows[i] - 1}` : '');
    const characters = Math.floor(room / CHARACTER);
    const short = name.length <= characters ? name : characters > 3 ? `${name.slice(0, characters - 1)}…` : '';
    const failed = work.kind[i] & 128;
    const ink: Rgb = failed ? palette.background : bright ? [20, 22, 26] : [255, 255, 255];
    if (short) write(surface, failed ? `✕ ${short}` : short, left + 6, middle, css(ink), '11px');
    g.fillStyle = css(palette.background, 0.55);
    if (right < surface.width) g.fillRect(right - 1, y, 1, height);
  }
}

/** A triangle where the last rank came, and by how much, where there is room. */
export function drawLateMarks(surface: Surface, lane: Lane, { y, height }: Place, bar: number, text: boolean): void {
  const { context: g, palette, view } = surface;
  const { late } = lane;
  const from = firstAbove(late.end, view.from, 0, late.n);
  const to = firstAbove(late.start, view.to, from, late.n);
  if (to - from > LATE_MARKED) return;
  for (let i = from; i < to; i++) {
    const right = surface.x(late.end[i]);
    const left = surface.x(late.start[i]);
    if (right - left < 5 || right > surface.width + 5) continue;
    g.fillStyle = css(palette.late);
    g.beginPath();
    g.moveTo(right - 5, y);
    g.lineTo(right + 5, y);
    g.lineTo(right, y + 8);
    g.fill();
    const length = `+${duration(late.end[i] - late.start[i])}`;
    const inside = Math.max(left, surface.gutter);
    const room = 26 + length.length * 6.2;
    if (!text || right - inside <= room) continue;
    // It may still be busy with another collective, whose name is there.
    if (lane.work.covered(late.end[i] - room * ((view.to - view.from) / surface.plotWidth), late.end[i])) continue;
    write(surface, length, right - 9, y + (height + bar) / 2, palette.dark ? 'rgb(255,190,145)' : 'rgb(140,58,0)', '600 11px', 'right');
  }
}

/** Stripes over a lane as long as its rank was not there, as far as the news of it came here. */
export function drawAbsence(surface: Surface, absences: readonly (readonly [number, number])[], { y, height }: Place): void {
  const { context: g, palette } = surface;
  inPlot(surface, () => {
    for (const [begin, end] of absences) {
      const left = Math.max(surface.gutter, surface.x(begin));
      const right = Math.min(surface.width, surface.x(end));
      if (right <= left) continue;
      g.save();
      g.beginPath();
      g.rect(left, y, right - left, height);
      g.clip();
      g.strokeStyle = css(palette.late, 0.3);
      g.lineWidth = 1;
      g.beginPath();
      // Fixed to the left end, so that the stripes move with it.
      for (let x = left - height - ((left - surface.x(begin)) % 7); x < right; x += 7) {
        g.moveTo(x, y + height);
        g.lineTo(x + height, y);
      }
      g.stroke();
      g.restore();
    }
  });
}

/** A frame in a lane as long as its rank waited for its user, with why. */
export function drawPauses(surface: Surface, pauses: readonly Mark[], { y, height }: Place): void {
  const { context: g, palette, store, view } = surface;
  inPlot(surface, () => {
    for (const { rank, begin, end, text } of pauses) {
      // Nothing ends meanwhile, so that the newest time would stand still.
      const left = Math.max(surface.gutter - 4, surface.x(begin));
      const right = Math.min(surface.width + 4, surface.x(end ?? Math.max(store.end, view.to)));
      if (right <= left || left > surface.width) continue;
      g.fillStyle = css(palette.text, 0.07);
      g.fillRect(left, y, right - left, height);
      g.strokeStyle = css(palette.text, 0.55);
      g.lineWidth = 1;
      g.setLineDash([4, 3]);
      g.strokeRect(left + 0.5, y + 0.5, right - left - 1, Math.max(1, height - 1));
      g.setLineDash([]);
      const why = text.replace(`rank ${rank} is `, '');
      if (height >= 12 && right - left > 24) write(surface, right - left > 24 + why.length * CHARACTER ? `❚❚ ${t(why)}` : '❚❚', Math.max(left, surface.gutter) + 7, y + height / 2, css(palette.text), '600 11px');
    }
  });
}
