import { AXIS, drawAxis, drawChosen, drawDropped, drawArrivals, drawFrame, drawCells, drawMoments, trackHeight, drawAbsence, drawHeading, drawLabel, drawLateMarks, drawNames, drawPauses, type Arrival, type Place, type Surface } from '../draw/lanes.ts';
import { css, type Palette } from '../draw/palette.ts';
import { Raster, type LaneRows, type LaneLayout } from '../draw/raster.ts';
import { rowsBetween, type FoundTracks } from '../model/statistics.ts';
import { slowestOf, type Lane, type Store, type Changed } from '../model/store.ts';
import { TrackEvents, type Cell } from '../model/track_events.ts';
import { Groups, type Group, type Viewport } from '../model/viewport.ts';

const LOOKED_AT = 512;

/** What lies under a point: rows of one lane, and which part of them. */
export interface Hit {
  lane: Lane;
  /** Number of the first row since the beginning of the lane, and how many there are (fused tensors). */
  row: number;
  rows: number;
  part: 'work' | 'wait' | 'late';
}

export function indexOf(hit: Hit): number {
  return hit.row - hit.lane.dropped;
}

/** What a lane shows at a time, at most `slack` away. */
export function hitTest(store: Store, lane: Lane, time: number, slack: number): Hit | null {
  const { work } = lane;
  const inside = work.at(time, 0);
  if (inside >= 0) return { lane, row: work.row[inside], rows: work.rows[inside], part: 'work' };
  const [from] = rowsBetween(lane, time, Infinity);
  const until = Math.min(lane.n, from + LOOKED_AT);
  let late: Hit | null = null;
  for (let k = from; k < until; k++) {
    if (lane.arrival[k] <= time) return { lane, row: lane.dropped + k, rows: 1, part: 'wait' };
    const came = late ? undefined : store.operations.get(lane.op[k]);
    if (came && came.lastRank === lane.rank && came.first <= time && time <= came.last && store.certain(came))
      late = { lane, row: lane.dropped + k, rows: 1, part: 'late' };
  }
  if (late) return late;
  const near = work.at(time, slack);
  return near >= 0 ? { lane, row: work.row[near], rows: work.rows[near], part: 'work' } : null;
}

/** The rows of an operation on all lanes that still have them: index by rank. */
export function rowsOf(store: Store, op: number): Map<number, number> {
  const found = new Map<number, number>();
  const came = store.operations.get(op);
  if (!came) return found;
  for (const lane of store.lanes) {
    // On every rank it ends after the last one came; clocks may differ by a little.
    const [from] = rowsBetween(lane, came.last - 1e6, Infinity);
    const until = Math.min(lane.n, from + LOOKED_AT * 4);
    for (let k = from; k < until; k++)
      if (lane.op[k] === op) {
        found.set(lane.rank, k);
        break;
      }
  }
  return found;
}

const HEADING = 22;
const SMALLEST = 4;
/** Height of a lane of a collapsed host. */
const SMALL = 3;

/** A lane's place. Pixels of the page from the top of the lanes; the strip is in pixels of the screen. */
export interface Box extends LaneRows {
  y: number;
  height: number;
  /** One of a collapsed host: has no texts. */
  small: boolean;
}

/** A host's place. */
export interface Heading {
  group: Group;
  y: number;
  height: number;
}

/** Where lanes and hosts lie. */
export class Arrangement implements LaneLayout {
  readonly strips: readonly Box[];
  readonly headings: readonly Heading[];
  readonly rows: number;
  readonly height: number;
  /** Distance of lanes that are not collapsed. */
  readonly pitch: number;
  private readonly boxes = new Map<Lane, Box>();

  /** Fits lanes into `room` pixels of the page, of which each has `ratio` on the screen. No lane is higher than `highest`. */
  constructor(groups: Groups, room: number, ratio: number, highest: number) {
    const { all, several } = groups;
    const number = (collapsed: boolean) => all.reduce((sum, group) => sum + (group.collapsed === collapsed || (!collapsed && !several) ? group.lanes.length : 0), 0);
    const open = Math.max(1, number(false));
    const rest = several ? room - all.length * HEADING - number(true) * SMALL : room;
    this.pitch = Math.max(SMALLEST, Math.min(highest, Math.floor(rest / open)));
    const pitch = Math.round(this.pitch * ratio);
    const gap = pitch >= 20 ? Math.max(2, Math.round(pitch * 0.12)) : pitch >= 6 ? 1 : 0;
    const late = pitch >= 10 ? Math.max(2, Math.round(pitch * 0.14)) : 0;
    const strips: Box[] = [];
    const headings: Heading[] = [];
    let row = 0;
    for (const group of all) {
      if (several) {
        headings.push({ group, y: row / ratio, height: HEADING });
        row += Math.round(HEADING * ratio);
      }
      const small = several && group.collapsed;
      const step = small ? Math.round(SMALL * ratio) : pitch;
      for (const lane of group.lanes) {
        const rows = small ? step : pitch - gap;
        strips.push({ lane, row, rows, late: small ? 0 : late, y: row / ratio, height: rows / ratio, small });
        row += step;
      }
      if (small) row += Math.round(3 * ratio);
    }
    this.strips = strips;
    this.headings = headings;
    this.rows = row;
    this.height = row / ratio;
    for (const box of strips) this.boxes.set(box.lane, box);
  }

  box(lane: Lane): Box | undefined {
    return this.boxes.get(lane);
  }

  laneAt(y: number): Lane | null {
    return this.strips.find(box => y >= box.y && y < box.y + Math.max(box.height, box.small ? 0 : this.pitch))?.lane ?? null;
  }

  headingAt(y: number): Heading | null {
    return this.headings.find(heading => y >= heading.y && y < heading.y + heading.height) ?? null;
  }
}

/** What is to be drawn besides the data. */
export interface Overlay {
  hover: Hit | null;
  selected: Hit | null;
  range: [number, number] | null;
  found: FoundTracks | null;
  /** Where the keys are. */
  focus: Lane | Heading['group'] | null;
}

/** Everything on the canvas. Sizes without a name are pixels of the page, not of the screen. */
export class Scene implements Surface {
  gutter = 132;
  top = AXIS;
  width = 0;
  height = 0;
  palette!: Palette;
  readonly groups = new Groups();
  readonly events = new TrackEvents();
  arrangement: Arrangement;
  readonly canvas: HTMLCanvasElement;
  readonly context: CanvasRenderingContext2D;
  readonly store: Store;
  readonly view: Viewport;
  private readonly raster = new Raster();
  private readonly changed: Changed;
  told: readonly [number, number] = [0, 1];
  slowest: Lane | null = null;
  private ratio = 1;
  private arranged = '';

  constructor(canvas: HTMLCanvasElement, store: Store, view: Viewport) {
    this.canvas = canvas;
    this.store = store;
    this.view = view;
    this.context = canvas.getContext('2d', { alpha: false })!;
    this.changed = store.watch();
    this.arrangement = new Arrangement(this.groups, 1, 1, 1);
  }

  dispose(): void {
    this.changed.end();
  }

  /** Fits the canvas into a width and, if the lanes don't ask for more, a height. No lane is higher than `highest`. */
  resize(width: number, height: number, highest?: number): void {
    this.ratio = Math.min(3, window.devicePixelRatio || 1);
    this.groups.update(this.store);
    this.events.update(this.store);
    this.gutter = width < 560 ? 64 : 132;
    this.top = AXIS + trackHeight(this.events);
    const most = highest ?? (this.store.lanes.length <= 4 ? 44 : 36);
    const key = [height - this.top, this.ratio, most, this.groups.version].join();
    if (key !== this.arranged) {
      this.arranged = key;
      this.arrangement = new Arrangement(this.groups, height - this.top, this.ratio, most);
    }
    this.width = width;
    this.height = this.top + Math.ceil(this.arrangement.height) + 4;
    const [w, h] = [Math.round(width * this.ratio), Math.round(this.height * this.ratio)];
    if (this.canvas.width === w && this.canvas.height === h) return;
    this.canvas.width = w;
    this.canvas.height = h;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
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

  get now(): number {
    return Math.max(this.store.end, this.view.extent[1]);
  }

  /** How long a pixel is. */
  get pixel(): number {
    return this.view.length / this.plotWidth;
  }

  laneAt(y: number): Lane | null {
    return y >= this.top ? this.arrangement.laneAt(y - this.top) : null;
  }

  headingAt(y: number): Heading | null {
    return y >= this.top ? this.arrangement.headingAt(y - this.top) : null;
  }

  cellAt(x: number, y: number): Cell | null {
    if (x < this.gutter || y >= this.top || y < this.top - 20) return null;
    return this.events.cellAt(this.time(x), this.pixel * 2, this.now);
  }

  /** Where a lane lies; `null` before it was drawn. */
  place(lane: Lane): Place | null {
    const box = this.arrangement.box(lane);
    return box ? { y: this.top + box.y, height: box.height } : null;
  }

  middle(lane: Lane): number {
    const place = this.place(lane);
    return place ? place.y + place.height / 2 : -1;
  }

  draw(palette: Palette, overlay: Overlay): void {
    this.palette = palette;
    this.told = overlay.range ?? this.view.seen;
    const waits = this.store.lanes.map(lane => ({ lane, heldUp: lane.late.covered(...this.told) }));
    this.slowest = slowestOf(waits, this.told[1] - this.told[0])?.lane ?? null;
    this.lanes(palette, overlay);
    this.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    drawAxis(this);
    drawDropped(this, this.store.forgotten + this.store.lostBefore);
    drawCells(this, this.events);
    drawMoments(this, this.events);
    for (const box of this.arrangement.strips) this.lane(box, overlay.focus === box.lane);
    for (const { group, y, height } of this.arrangement.headings) {
      if (overlay.focus === group) this.focused(this.top + y, height - 2);
      drawHeading(this, group, { y: this.top + y, height });
    }
    if (overlay.range) drawChosen(this, ...overlay.range);
    for (const hit of [overlay.selected, overlay.hover]) if (hit) this.emphasis(hit, hit !== overlay.hover);
  }

  /** Background and spans, pixel by pixel of the screen. */
  private lanes(palette: Palette, overlay: Overlay): void {
    const { context: g, canvas, ratio, view } = this;
    const top = Math.round(this.top * ratio);
    const left = Math.round(this.gutter * ratio);
    const width = Math.max(1, canvas.width - left);
    const bottom = top + this.arrangement.rows;
    g.setTransform(1, 0, 0, 1, 0, 0);
    g.fillStyle = css(palette.background);
    g.fillRect(0, 0, canvas.width, top);
    g.fillRect(0, 0, left, canvas.height);
    g.fillRect(0, bottom, canvas.width, canvas.height - bottom);
    const scale = { from: view.from, to: view.to, scale: width / view.length, width };
    this.raster.paint(g, this.arrangement, scale, left, top, palette, overlay.found, this.changed.from);
    this.changed.from = Infinity;
  }

  private lane(box: Box, focused: boolean): void {
    const { lane, height } = box;
    const place = { y: this.top + box.y, height };
    if (focused) this.focused(place.y, height);
    const absent = this.events.absent.get(lane.rank);
    if (absent) drawAbsence(this, absent, place);
    const paused = this.events.paused.get(lane.rank);
    if (paused) drawPauses(this, paused, place);
    if (box.small) return;
    const { pitch } = this.arrangement;
    const bar = box.late / this.ratio;
    const hosts = this.arrangement.headings.length > 0;
    const mates = (hosts && this.groups.of(lane)?.lanes) || this.store.lanes;
    drawLabel(this, lane, place, pitch, hosts ? 11 : 0, [mates.indexOf(lane), mates.length]);
    if (pitch >= 14) drawNames(this, lane, place, bar);
    if (pitch >= 10) drawLateMarks(this, lane, place, bar, pitch >= 14);
  }

  private focused(y: number, height: number): void {
    this.context.fillStyle = css(this.palette.text, 0.08);
    this.context.fillRect(0, y, this.gutter, height);
    this.context.fillStyle = css(this.palette.selected, 0.8);
    this.context.fillRect(0, y, 3, height);
  }

  private emphasis(hit: Hit, strong: boolean): void {
    const { store } = this;
    const k = indexOf(hit);
    const { lane } = hit;
    const box = this.arrangement.box(lane);
    if (k < 0 || k >= lane.n || !box) return;
    drawFrame(this, lane, k, { y: this.top + box.y, height: box.height }, strong);
    const came = store.operations.get(lane.op[k]);
    if (!came || came.count < 2) return;
    const certain = store.certain(came);
    const points: Arrival[] = [];
    for (const [rank, row] of rowsOf(store, lane.op[k])) {
      const of = store.lane(rank);
      const place = this.arrangement.box(of);
      if (!place) continue;
      points.push({
        time: of.arrival[row],
        y: this.top + place.y + place.height / 2,
        size: Math.max(1.5, Math.min(5, place.height / 3)),
        error: store.clockError.get(rank) ?? 0,
        last: certain && rank === came.lastRank,
      });
    }
    points.sort((a, b) => a.y - b.y);
    drawArrivals(this, points);
  }
}
