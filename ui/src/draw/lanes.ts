import { KINDS, NOT_STARTED, type Lane, type Store, type Mark } from '../model/store.ts';
import type { TrackEvents } from '../model/track_events.ts';
import { firstAbove } from '../model/tracks.ts';
import type { Group } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { count, duration, ticks, percent, ranks } from './format.ts';
import { css, type Palette, type Rgb } from './palette.ts';

export const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

/** Surface that all parts of the picture draw on. Pixels are those of the page; times are ns. */
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
  /** The stretch of time that the figures in the labels are of: the chosen one, or that in view if none is chosen. */
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

export const TRACK = 20;
const DRAWN = 400;
const MARK_CHARACTER = 6.2; // pixels, at 11 px
const SIGN = 10; // pixels
const SIGNS: Record<Mark['kind'], string> = { cell: '', paused: '', waiting: '', joined: '▲', left: '✕', formed: '◇', abort: '◆' };

/** Height of the tracks of cells and, if anything happened to them, of ranks. */
export function trackHeight(events: TrackEvents): number {
  return TRACK * (events.moments.length ? 2 : 1);
}

/** The track of cells: one bar each, over all ranks it ran on. */
export function drawCells(surface: Surface, events: TrackEvents): void {
  const { context: g, palette } = surface;
  const y = AXIS + trackHeight(events) - TRACK;
  write(surface, t('cells'), 10, y + TRACK / 2 - 2, css(palette.faint), '11px');
  inPlot(surface, () => {
    for (const cell of events.cells.slice(-DRAWN)) {
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
export function drawMoments(surface: Surface, events: TrackEvents): void {
  const { moments } = events;
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
      const text = shortened(mark.text, Math.floor(room / MARK_CHARACTER));
      if (x >= free && text) {
        write(surface, text, sign + 8, middle, css(colour), '11px');
        free = x + 12 + text.length * MARK_CHARACTER;
      } else if (i + 1 === last) {
        // The newest is at the right end, and says the most.
        const before = shortened(mark.text, Math.floor((x - Math.max(free, surface.gutter) - 18) / MARK_CHARACTER));
        if (before) write(surface, before, x - 8, middle, css(colour), '11px', 'right');
      }
    }
  });
}

function shortened(text: string, characters: number): string {
  if (characters < 6) return '';
  return text.length <= characters ? text : `${text.slice(0, Math.min(80, characters - 1))}…`;
}

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
