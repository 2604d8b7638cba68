import { count, duration, ticks } from '../draw/format.ts';
import { css, type Palette, type Rgb } from '../draw/palette.ts';
import { Raster, layout, type Layout, type Scale } from '../draw/raster.ts';
import type { FoundTracks } from '../model/found.ts';
import type { Lane } from '../model/lane.ts';
import { firstAbove } from '../model/track.ts';
import { KINDS, NOT_STARTED, type Changed, type Mark, type Store } from '../model/store.ts';
import type { Viewport } from '../model/viewport.ts';
import { indexOf, rowsOf, type Hit } from './hits.ts';

const AXIS = 24;
const CELLS = 20;
const MARKS_DRAWN = 400;
const FONT = 'system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';

/** What is to be drawn besides the data. */
export interface Overlay {
  hover: Hit | null;
  selected: Hit | null;
  range: [number, number] | null;
  found: FoundTracks | null;
  lane: number;
}

/** Everything on the canvas. Sizes without a name are pixels of the page, not of the screen. */
export class Scene {
  gutter = 132;
  top = AXIS + CELLS;
  where: Layout = layout(1, 1);
  width = 0;
  height = 0;
  readonly canvas: HTMLCanvasElement;
  private readonly store: Store;
  private readonly view: Viewport;
  private readonly context: CanvasRenderingContext2D;
  private readonly raster = new Raster();
  private readonly changed: Changed;
  private ratio = 1;

  constructor(canvas: HTMLCanvasElement, store: Store, view: Viewport) {
    this.canvas = canvas;
    this.store = store;
    this.view = view;
    this.context = canvas.getContext('2d', { alpha: false })!;
    this.changed = store.watch();
  }

  dispose(): void {
    this.changed.end();
  }

  /** Fits the canvas into a width and, if the lanes don't ask for less, a height. */
  resize(width: number, height: number): void {
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    const lanes = Math.max(1, this.store.lanes.length);
    const pitch = Math.max(4, Math.min(lanes <= 4 ? 44 : 36, Math.floor((height - this.top) / lanes)));
    this.where = layout(lanes, Math.round(pitch * this.ratio));
    this.gutter = width < 560 ? 64 : 132;
    this.width = width;
    this.height = this.top + Math.ceil(this.where.height / this.ratio) + 4;
    const [w, h] = [Math.round(width * this.ratio), Math.round(this.height * this.ratio)];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      this.canvas.width = w;
      this.canvas.height = h;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${this.height}px`;
    }
  }

  get pitch(): number {
    return this.where.pitch / this.ratio;
  }

  get plotWidth(): number {
    return Math.max(1, this.width - this.gutter);
  }

  x(time: number): number {
    return this.gutter + ((time - this.view.from) / this.view.length) * this.plotWidth;
  }

  time(x: number): number {
    return this.view.from + ((x - this.gutter) / this.plotWidth) * this.view.length;
  }

  laneAt(y: number): Lane | null {
    return this.store.lanes[Math.floor((y - this.top) / this.pitch)] ?? null;
  }

  draw(palette: Palette, overlay: Overlay): void {
    const { context: g, store, view, ratio } = this;
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.fillStyle = css(palette.background);
    g.fillRect(0, 0, this.canvas.width, Math.round(this.top * ratio));
    g.fillRect(0, 0, Math.round(this.gutter * ratio), this.canvas.height);
    const bottom = Math.round(this.top * ratio) + this.where.height;
    g.fillRect(0, bottom, this.canvas.width, this.canvas.height - bottom);
    const left = Math.round(this.gutter * ratio);
    const width = Math.max(1, this.canvas.width - left);
    const scale: Scale = { from: view.from, to: view.to, scale: width / view.length, width };
    this.raster.paint(g, store.lanes, scale, this.where, left, Math.round(this.top * ratio), palette, overlay.found, this.changed.from);
    this.changed.from = Infinity;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.axis(palette);
    this.marks(palette);
    store.lanes.forEach((lane, l) => {
      const y = this.top + l * this.pitch;
      this.label(lane, y, palette, overlay.lane === l);
      if (this.pitch >= 14) this.names(lane, y, palette);
      if (this.pitch >= 10) this.lateMarks(lane, y, palette);
    });
    if (overlay.range) this.range(overlay.range, palette);
    for (const hit of [overlay.selected, overlay.hover]) if (hit) this.emphasis(hit, palette, hit === overlay.hover);
  }

  private text(text: string, x: number, y: number, colour: Rgb, font: string, align: CanvasTextAlign = 'left'): void {
    const g = this.context;
    g.font = `${font} ${FONT}`;
    g.textAlign = align;
    g.textBaseline = 'middle';
    g.fillStyle = css(colour);
    g.fillText(text, x, y);
  }

  private axis(palette: Palette): void {
    const g = this.context;
    for (const tick of ticks(this.view.from, this.view.to, this.plotWidth)) {
      const x = Math.round(this.x(tick.at)) + 0.5;
      g.fillStyle = css(palette.text, 0.09);
      g.fillRect(x, AXIS - 5, 1, this.height - AXIS);
      if (x < this.gutter + 24 || x > this.width - 24) continue;
      this.text(tick.text, x, AXIS / 2 - 1, palette.faint, '11px', 'center');
    }
  }

  private marks(palette: Palette): void {
    const g = this.context;
    this.text('cells', 10, AXIS + CELLS / 2 - 2, palette.faint, '11px');
    const cells = new Map<string, Mark>();
    for (const mark of this.store.marks.values()) {
      if (mark.kind === 'cell') {
        const one = cells.get(mark.text);
        if (!one) cells.set(mark.text, { ...mark });
        else {
          one.begin = Math.min(one.begin, mark.begin);
          one.end = one.end === null || mark.end === null ? null : Math.max(one.end, mark.end);
          one.ok &&= mark.ok;
        }
      } else this.moment(mark, palette);
    }
    g.save();
    g.beginPath();
    g.rect(this.gutter, AXIS - 2, this.plotWidth, CELLS);
    g.clip();
    for (const mark of [...cells.values()].slice(-MARKS_DRAWN)) {
      const from = Math.max(this.gutter - 2, this.x(mark.begin));
      const to = Math.min(this.width + 2, this.x(mark.end ?? this.store.end));
      if (to < this.gutter || from > this.width) continue;
      g.fillStyle = css(mark.ok ? palette.text : palette.late, mark.ok ? 0.1 : 0.3);
      g.beginPath();
      g.roundRect(from, AXIS, Math.max(1, to - from - 1), CELLS - 6, 3);
      g.fill();
      if (to - from > 34) this.text(mark.text, from + 7, AXIS + CELLS / 2 - 2.5, palette.text, '11px');
    }
    g.restore();
  }

  private moment(mark: Mark, palette: Palette): void {
    const x = this.x(mark.begin);
    if (x < this.gutter || x > this.width) return;
    const g = this.context;
    const colour = mark.kind === 'joined' ? palette.text : palette.late;
    g.strokeStyle = css(colour, 0.9);
    g.setLineDash([4, 3]);
    g.beginPath();
    g.moveTo(x, AXIS - 2);
    g.lineTo(x, this.height - 4);
    g.stroke();
    g.setLineDash([]);
    this.text(mark.text.slice(0, 60), x + 4, AXIS + CELLS / 2 - 2, colour, '11px');
  }

  private label(lane: Lane, y: number, palette: Palette, focused: boolean): void {
    const g = this.context;
    const height = this.pitch;
    if (focused) {
      g.fillStyle = css(palette.text, 0.07);
      g.fillRect(0, y, this.gutter, height - this.where.gap / this.ratio);
    }
    if (height < 9 && lane.rank % Math.ceil(11 / height)) return;
    const all = this.store.lanes.reduce((sum, one) => sum + one.heldUp, 0);
    const share = all ? lane.heldUp / all : 0;
    // With equal ranks, each would be waited for as long as any other.
    const slow = lane.timesLast > 1 && share > Math.min(0.5, 3 / this.store.lanes.length);
    const two = height >= 30 && this.gutter > 80;
    const middle = y + (height - this.where.gap / this.ratio) / 2;
    const name = this.gutter > 80 || height < 9 ? `rank ${lane.rank}` : `${lane.rank}`;
    this.text(name, 10, two ? middle - 7 : middle, slow ? palette.late : palette.text, `${slow ? 700 : 600} ${height >= 16 ? 12 : 9.5}px`);
    if (two) this.text(lane.timesLast ? `last ${count(lane.timesLast)}× · ${duration(lane.heldUp)}` : `${count(lane.n)} spans`, 10, middle + 8, palette.faint, '11px');
    else if (height >= 14 && this.gutter > 80 && slow) this.text(`${Math.round(share * 100)} %`, this.gutter - 8, middle, palette.late, '600 11px', 'right');
  }

  /** The names on spans that are wide enough. */
  private names(lane: Lane, y: number, palette: Palette): void {
    const g = this.context;
    const { work } = lane;
    const from = firstAbove(work.end, this.view.from, 0, work.n);
    const to = firstAbove(work.start, this.view.to, from, work.n);
    if (to - from > 1500) return;
    const middle = y + (this.pitch + (this.where.lateBar - this.where.gap) / this.ratio) / 2;
    for (let i = from; i < to; i++) {
      const left = Math.max(this.gutter, this.x(work.start[i]));
      const right = Math.min(this.width, this.x(work.end[i]));
      const room = right - left - 12;
      if (room < 30) continue;
      const k = work.row[i] - lane.dropped;
      const kind = work.kind[i] & 127;
      const colour = palette.kinds[kind];
      const bright = (0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]) / 255 > 0.5;
      const name = (this.store.names[lane.name[k]] || KINDS[kind]) + (work.rows[i] > 1 ? ` +${work.rows[i] - 1}` : '');
      const characters = Math.floor(room / 6.3);
      const short = name.length <= characters ? name : characters > 3 ? `${name.slice(0, characters - 1)}…` : '';
      const failed = work.kind[i] & 128;
      const ink: Rgb = failed ? palette.background : bright ? [20, 22, 26] : [255, 255, 255];
      if (short) this.text(failed ? `✕ ${short}` : short, left + 6, middle, ink, '11px');
      g.fillStyle = css(palette.background, 0.55);
      if (right < this.width) g.fillRect(right - 1, y, 1, this.pitch - this.where.gap / this.ratio);
    }
  }

  /** A triangle where the last rank came, and by how much, where there is room. */
  private lateMarks(lane: Lane, y: number, palette: Palette): void {
    const g = this.context;
    const { late } = lane;
    const from = firstAbove(late.end, this.view.from, 0, late.n);
    const to = firstAbove(late.start, this.view.to, from, late.n);
    if (to - from > 300) return;
    for (let i = from; i < to; i++) {
      const right = this.x(late.end[i]);
      const left = this.x(late.start[i]);
      if (right - left < 5 || right > this.width + 5) continue;
      g.fillStyle = css(palette.late);
      g.beginPath();
      g.moveTo(right - 5, y);
      g.lineTo(right + 5, y);
      g.lineTo(right, y + 8);
      g.fill();
      const text = `+${duration(late.end[i] - late.start[i])}`;
      const inside = Math.max(left, this.gutter);
      if (right - inside > 26 + text.length * 6.2 && this.pitch >= 14)
        this.text(text, right - 9, y + (this.pitch + (this.where.lateBar - this.where.gap) / this.ratio) / 2, palette.dark ? [255, 190, 145] : [140, 58, 0], '600 11px', 'right');
    }
  }

  private range([from, to]: [number, number], palette: Palette): void {
    const g = this.context;
    const [left, right] = [Math.max(this.gutter, this.x(from)), Math.min(this.width, this.x(to))];
    g.fillStyle = css(palette.text, 0.1);
    g.fillRect(left, AXIS - 4, right - left, this.height);
    g.fillStyle = css(palette.text, 0.8);
    g.fillRect(left, AXIS - 4, 1, this.height);
    g.fillRect(right - 1, AXIS - 4, 1, this.height);
    if (right - left > 60) this.text(duration(to - from), (left + right) / 2, AXIS / 2 - 1, palette.text, '600 11px', 'center');
  }

  /** Frames a span and joins the arrivals of all ranks at its operation. */
  private emphasis(hit: Hit, palette: Palette, hovered: boolean): void {
    const { context: g, store } = this;
    const k = indexOf(hit);
    if (k < 0 || k >= hit.lane.n) return;
    const l = store.lanes.indexOf(hit.lane);
    const y = this.top + l * this.pitch;
    const height = this.pitch - this.where.gap / this.ratio;
    const { lane } = hit;
    const from = lane.flags[k] & NOT_STARTED ? lane.arrival[k] : lane.arrival[k] + lane.started[k];
    const [left, right] = [this.x(from), this.x(lane.arrival[k] + lane.finished[k])];
    g.save();
    g.beginPath();
    g.rect(this.gutter, 0, this.plotWidth, this.height);
    g.clip();
    g.lineWidth = hovered ? 1 : 2;
    g.strokeStyle = css(palette.selected, hovered ? 0.7 : 1);
    g.strokeRect(left, y + 0.5, Math.max(2, right - left), height - 1);
    const came = store.operations.get(lane.op[k]);
    if (came && came.count > 1) this.arrivals(lane.op[k], came.lastRank, palette);
    g.restore();
  }

  private arrivals(op: number, last: number, palette: Palette): void {
    const { context: g, store } = this;
    const points: [number, number, number][] = [];
    for (const [rank, k] of rowsOf(store, op)) {
      const lane = store.lane(rank);
      points.push([this.x(lane.arrival[k]), this.top + (store.lanes.indexOf(lane) + 0.5) * this.pitch - this.where.gap / this.ratio / 2, rank]);
    }
    g.lineWidth = 1.5;
    g.strokeStyle = css(palette.selected, 0.65);
    g.setLineDash([3, 3]);
    g.beginPath();
    points.forEach(([x, y], i) => (i ? g.lineTo(x, y) : g.moveTo(x, y)));
    g.stroke();
    g.setLineDash([]);
    for (const [x, y, rank] of points) {
      g.beginPath();
      g.arc(x, y, Math.min(5, this.pitch / 3), 0, 7);
      g.fillStyle = css(rank === last ? palette.late : palette.background);
      g.strokeStyle = css(rank === last ? palette.background : palette.selected);
      g.fill();
      g.stroke();
    }
  }
}

