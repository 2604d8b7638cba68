import uPlot from 'uplot';
import { ticks, levels, levelTexts, logLevels, quantity, number } from '../draw/format.ts';
import { css, mixed, rankColour, rankDash, type Palette, type Rgb } from '../draw/palette.ts';
import { drawDots, fillBetween, fillLine, Layer } from '../draw/polyline.ts';
import { bandOf, gapOf, gridOf, isolated, partsOf, SHARES, stackOf, widened, type Borders, type Chart, type Gaps, type Grid } from '../model/charts.ts';
import type { Series, SeriesStore } from '../model/series.ts';
import type { Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { button, h } from './dom.ts';

const TITLES: Record<string, () => string> = {
  'hvdlab/step_time': () => t('Step time'),
  'hvdlab/samples_per_second': () => t('Samples/s'),
  'hvdlab/share/': () => t('Time spent'),
  'hvdlab/lateness': () => t('Lateness'),
  'hvdlab/gradient_norm': () => t('Gradient norm'),
  'hvdlab/loss_scale': () => t('Loss scale'),
  'hvdlab/learning_rate': () => t('Learning rate'),
  'hvdlab/cpu': () => t('CPU'),
  'hvdlab/rss': () => t('Memory'),
  'hvdlab/threads': () => t('Threads'),
};

/** What a chart is called: our own by their meaning, those of users as they call them. */
export function titleOf(id: string): string {
  const known = TITLES[id];
  if (known) return known();
  const gpu = id.match(/^hvdlab\/gpu(\d+)\/(\w+)$/);
  if (gpu) return gpu[2] === 'memory' ? t('GPU %1 memory', gpu[1]) : t('GPU %1', gpu[1]);
  const bandwidth = id.match(/^hvdlab\/bandwidth\/(bus|algorithm)\/(.+)$/);
  if (bandwidth) return bandwidth[1] === 'bus' ? t('%1 bus', bandwidth[2]) : t('%1 algorithm', bandwidth[2]);
  return id.replace(/^hvdlab\//, '').replaceAll('_', id.startsWith('hvdlab/') ? ' ' : '_');
}

/** With more ranks than this, a chart shows what all do, and single ranks only when they are chosen. */
export const LINES = 8;
const FONT = '10.5px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
/** A picture that would be drawn out or pressed together more than this shows nothing. */
const WIDEST = 32;
/** With more points for each pixel than this, lines are filled by columns of pixels. */
const DENSE = 0.5;
const SPARSE = 24; // pixels for each point from which on it is marked
const DOT = 2.25; // its radius in pixels
// Lines of a band: its upper edge, its middle and its lower edge; those of chosen ranks follow.
const [MIDDLE, LAST_OF_BAND] = [1, 2];

/** State that all charts share. */
export interface Look {
  palette: Palette;
  /** Pixels left of the time axis, and those of it. */
  gutter: number;
  width: number;
  height: number;
  /** All ranks that report anything: their places give them their colours. */
  ranks: number[];
  /** Ranks that are pointed at or chosen; none if it is empty. */
  chosen: ReadonlySet<number>;
  borders: Borders;
}

interface Ink {
  colour: Rgb;
  alpha: number;
  width: number;
}

/** All charts use it, one after the other. */
const layer = new Layer();

/** One chart: its name and newest value at the left, and the lines. */
export class ChartView {
  readonly root: HTMLElement;
  readonly place: HTMLElement;
  chart: Chart;
  /** Whether what is shown is not what there is. */
  stale = true;
  visible = true;
  private log = false;
  /** Whether nothing is shown until it is drawn. */
  private blank = false;
  private readonly toggle: HTMLButtonElement;
  private readonly store: SeriesStore;
  private readonly view: Viewport;
  private readonly choose: (rank: number) => void;
  private readonly title = h('div', { class: 'hvd-chart-title' });
  private readonly value = h('div', { class: 'hvd-chart-value' });
  private plot: uPlot | null = null;
  private made = '';
  private look!: Look;
  private grid: Grid = { x: [], lines: [], low: 0, high: 1, broken: [], points: 0 };
  private bounds: [number, number] = [0, 1];
  /** Of each line, and of the area between the outer ones of a band. */
  private inks: Ink[] = [];
  private band: Ink | null = null;
  private from = 0;
  private to = 0;

  constructor(chart: Chart, store: SeriesStore, view: Viewport, choose: (rank: number) => void) {
    this.choose = choose;
    this.chart = chart;
    this.store = store;
    this.view = view;
    this.place = h('div', { class: 'hvd-chart-plot' });
    this.toggle = button(t('log'), t('Logarithmic axis'), () => this.setLog(!this.log));
    this.toggle.className = 'hvd-chart-log';
    this.toggle.setAttribute('aria-pressed', 'false');
    const label = h('div', { class: 'hvd-chart-label' }, this.title, this.value, chart.kind === 'ranks' && this.toggle);
    this.root = h('div', { class: 'hvd-chart', 'data-chart': chart.id, role: 'group' }, label, this.place);
    const name = titleOf(chart.id);
    this.title.textContent = name;
    this.title.title = chart.id;
  }

  dispose(): void {
    this.plot?.destroy();
    this.root.remove();
  }

  private setLog(on: boolean): void {
    this.log = on;
    this.toggle.setAttribute('aria-pressed', String(on));
    this.draw(this.look);
  }

  /** The series of one of its names, by rank. */
  series(name = this.chart.names[0]): Series[] {
    return this.store.named.get(name) ?? [];
  }

  get stacked(): string[] {
    return ['compute', 'transfer', 'wait'].map(part => SHARES + part);
  }

  /** It was out of sight and comes into it: a picture of other times would be drawn out, so nothing is shown until it is drawn. */
  appear(): void {
    if (!this.stale || !this.plot) return;
    this.blank = true;
    this.plot.ctx.canvas.style.visibility = 'hidden';
  }

  /** Something has changed: until it is drawn, what there is goes where its times are now. */
  move(): void {
    this.stale = true;
    const { plot, view } = this;
    if (!plot || !(this.to > this.from)) return;
    const scale = (this.to - this.from) / view.length;
    const x = ((this.from - view.from) / view.length) * plot.width;
    const { style } = plot.ctx.canvas;
    style.visibility = this.blank || scale > WIDEST || scale < 1 / WIDEST ? 'hidden' : '';
    style.transform = scale === 1 && !x ? '' : `translateX(${x}px) scaleX(${scale})`;
  }

  draw(look: Look): void {
    this.stale = this.blank = false;
    [this.from, this.to] = [this.view.from, this.view.to];
    this.look = look;
    (this.root.firstChild as HTMLElement).style.width = `${look.gutter}px`;
    this.root.style.height = `${look.height}px`;
    const band = this.chart.kind === 'ranks' && this.series().length > LINES;
    const shown = this.chart.kind === 'shares' ? [] : this.series().filter(one => !band || look.chosen.has(one.rank));
    this.collect(band, shown);
    const key = [look.palette.background, look.palette.dark, band, shown.map(one => one.rank), look.ranks.length, [...look.chosen], this.log].join('|');
    if (key !== this.made) {
      this.made = key;
      this.plot?.destroy();
      this.plot = new uPlot(this.options(band, shown), [[], ...this.grid.lines.map(() => [])] as uPlot.AlignedData, this.place);
    }
    const plot = this.plot!;
    if (plot.width !== look.width || plot.height !== look.height) plot.setSize({ width: look.width, height: look.height });
    // Draw now, not when the script has ended: the pace must measure it.
    plot.batch(() => plot.setData([this.grid.x, ...this.grid.lines] as uPlot.AlignedData, true));
    const { style } = plot.ctx.canvas;
    [style.transform, style.visibility] = ['', ''];
    this.texts();
  }

  private collect(band: boolean, shown: Series[]): void {
    const { view, chart } = this;
    const width = Math.max(1, Math.round(this.look.width));
    const { borders } = this.look;
    const gaps: Gaps = { longest: gapOf(chart, this.series()), borders: rank => borders.of(rank, chart.sampled) };
    if (chart.kind === 'shares') {
      const only = (series: Series[]) => (this.look.chosen.size ? series.filter(one => this.look.chosen.has(one.rank)) : series);
      this.grid = stackOf(this.stacked.map(name => only(this.series(name))), view.from, view.to, width);
    } else if (band) {
      const all = bandOf(this.series(), view.from, view.to, width, gaps);
      const few = gridOf(shown, view.from, view.to, width, gaps);
      this.grid = merged(all, few);
    } else this.grid = gridOf(shown, view.from, view.to, width, gaps);
    this.bounds = this.range();
  }

  private range(): [number, number] {
    const { zero, most, kind } = this.chart;
    if (kind === 'shares') return [0, 1];
    let { low, high } = this.grid;
    if (low > high) {
      // Nothing in view: what is left and right of it goes through.
      const values = this.grid.lines.flat().filter(value => value != null);
      [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 1];
    }
    if (this.log) return this.logRange(high);
    if (zero && low > 0) low = 0;
    high = Math.max(high, most || -Infinity);
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return [zero && low === 0 ? -room * 0.4 : low - room, high + room];
  }

  /** What is not positive has no place on a logarithmic axis, so it is not drawn. */
  private logRange(high: number): [number, number] {
    let low = Infinity;
    for (const values of this.grid.lines)
      values.forEach((value, i) => {
        if (value == null) return;
        if (value <= 0) values[i] = null;
        else if (value < low) low = value;
      });
    if (!(low <= high)) return [0.1, 1];
    const room = Math.max(1.05, (high / low) ** 0.08);
    return [low / room, high * room];
  }

  private options(band: boolean, shown: Series[]): uPlot.Options {
    const { palette, width, height, ranks, chosen } = this.look;
    const stroked = uPlot.paths.linear!();
    const paths: uPlot.Series.PathBuilder = (...all) => (this.dense ? null : stroked(...all));
    const base = { spanGaps: false, paths, points: { show: false } };
    const line = (one: Series): uPlot.Series => {
      const place = ranks.indexOf(one.rank);
      const faint = chosen.size > 0 && !chosen.has(one.rank);
      const ink = { colour: rankColour(place, palette), alpha: faint ? 0.18 : 1, width: faint ? 1 : chosen.size ? 2.2 : 1.5 };
      const stroke = css(ink.colour, ink.alpha);
      this.inks.push(ink);
      return { ...base, label: String(one.rank), stroke, width: ink.width, dash: rankDash(place) };
    };
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    this.inks = [];
    this.band = null;
    if (this.chart.kind === 'shares') {
      const fills = shareColours(palette).map(colour => css(colour, palette.dark ? 0.85 : 0.8));
      fills.forEach((fill, i) => series.push({ width: 0, points: { show: false }, fill: i ? undefined : fill }));
      bands.push({ series: [2, 1], fill: fills[1] }, { series: [3, 2], fill: fills[2] });
    } else if (band) {
      const colour = palette.kinds[0];
      const edge: uPlot.Series = { ...base, stroke: css(colour, 0.35), width: 1 };
      series.push(edge, { ...base, stroke: css(colour), width: 1.8 }, edge);
      this.band = { colour, alpha: palette.dark ? 0.28 : 0.18, width: 0 };
      this.inks.push({ colour, alpha: 0.35, width: 1 }, { colour, alpha: 1, width: 1.8 }, { colour, alpha: 0.35, width: 1 });
      bands.push({ series: [3, 1], fill: css(colour, this.band.alpha) });
    }
    series.push(...shown.map(line));
    return {
      width,
      height,
      padding: [0, 0, 0, 0],
      legend: { show: false },
      cursor: { show: false },
      axes: [{ show: false }, { show: false }],
      scales: { x: { time: false, range: () => [this.view.from, this.view.to] }, y: { range: () => this.bounds, distr: this.log ? 3 : 1 } },
      series,
      bands,
      hooks: { drawClear: [plot => this.lines(plot)], draw: [plot => this.columns(plot), plot => this.dots(plot, band), plot => this.marks(plot)] },
    };
  }

  /** The lines behind the chart. */
  private lines(plot: uPlot): void {
    const { palette, width, height } = this.look;
    const g = plot.ctx;
    const ratio = uPlot.pxRatio;
    g.save();
    g.fillStyle = css(palette.text, 0.09);
    for (const tick of ticks(this.view.from, this.view.to, width)) g.fillRect(Math.round(plot.valToPos(tick.at, 'x', true)), 0, ratio, height * ratio);
    for (const level of this.levels()) g.fillRect(0, Math.round(plot.valToPos(level, 'y', true)), width * ratio, ratio);
    g.restore();
  }

  private levels(): number[] {
    if (this.chart.kind === 'shares') return [0, 0.5, 1];
    if (this.log) return logLevels(...this.bounds);
    return levels(...this.bounds, this.chart.unit, this.look.height > 110 ? 4 : 2.5);
  }

  /** What lies over the lines: what the levels are, and where a value is no number. */
  private marks(plot: uPlot): void {
    const { palette, height } = this.look;
    const g = plot.ctx;
    const ratio = uPlot.pxRatio;
    g.save();
    g.scale(ratio, ratio);
    g.font = FONT;
    g.textBaseline = 'middle';
    const text = (label: string, x: number, y: number, colour: Rgb) => {
      // On a plate: lines that go through would make it hard to read.
      g.fillStyle = css(palette.background, 0.86);
      g.beginPath();
      g.roundRect(x - 2, y - 6.5, g.measureText(label).width + 4, 13, 3);
      g.fill();
      g.fillStyle = css(colour);
      g.fillText(label, x, y);
    };
    const shown = this.levels();
    levelTexts(shown, this.chart.unit).forEach((label, i) => {
      const y = plot.valToPos(shown[i], 'y', false);
      if (y >= 0 && y <= height) text(label, 5, y - 7 > 6 ? y - 7 : y + 7, palette.faint);
    });
    let last = -Infinity;
    for (const time of this.grid.broken) {
      const x = plot.valToPos(time, 'x', false);
      if (x - last < 8) continue;
      text('✕', x - 4, 8, palette.late);
      last = x;
    }
    g.restore();
  }

  /** Whether the lines have so many turns that strokes would take too long. */
  private get dense(): boolean {
    return this.chart.kind !== 'shares' && Math.max(this.grid.points, this.grid.x.length / 2) > this.look.width * DENSE;
  }

  /** The lines, if they are dense. */
  private columns(plot: uPlot): void {
    if (!this.dense) return;
    const { view, grid, look } = this;
    const ratio = uPlot.pxRatio;
    layer.clear(Math.round(look.width * ratio), Math.round(look.height * ratio));
    const x = grid.x.map(time => ((time - view.from) / view.length) * layer.width);
    const y = grid.lines.map(values => values.map(value => (value == null ? value : plot.valToPos(value, 'y', true))));
    if (this.band) fillBetween(layer, x, y[2], y[0], this.band.colour, this.band.alpha);
    this.inks.forEach(({ colour, alpha, width }, line) => fillLine(layer, x, y[line], width * ratio, colour, alpha));
    layer.draw(plot.ctx);
  }

  /** The points themselves where there are few, and otherwise those that no line leads to. */
  private dots(plot: uPlot, band: boolean): void {
    const { view, grid, look } = this;
    if (this.chart.kind === 'shares') return;
    const all = !band && grid.points < look.width / SPARSE;
    const ratio = uPlot.pxRatio;
    const x = grid.x.map(time => ((time - view.from) / view.length) * look.width * ratio);
    this.inks.forEach(({ colour, alpha }, line) => {
      if (band && line !== MIDDLE && line <= LAST_OF_BAND) return;
      const y = (all ? grid.lines[line] : isolated(grid.lines[line])).map(value => (value == null ? value : plot.valToPos(value, 'y', true)));
      drawDots(plot.ctx, x, y, DOT * ratio, colour, alpha);
    });
  }

  /** At the left: the median of the newest values in view and the rank furthest from it, or all of a stack's parts. */
  private texts(): void {
    const { chart, look, view } = this;
    const short = look.gutter < 90;
    const rows: HTMLElement[] = [];
    const add = (text: string, style = '', title = '') => rows.push(h('div', { ...(style && { class: style }), ...(title && { title }) }, text));
    if (chart.kind === 'shares') {
      const colours = shareColours(look.palette);
      const parts = partsOf(this.grid);
      this.stacked.forEach((name, i) => {
        const value = parts[i];
        const share = h('div', { title: t('of the time in view in which the ranks ran') }, h('i', { class: 'hvd-swatch', style: `background:${css(colours[i])}` }), ` ${short ? '' : shareName(name)} ${Number.isNaN(value) ? '' : `${Math.round(value * 100)} %`}`);
        rows.push(share);
      });
    } else {
      const now = this.at(view.following ? Infinity : view.to);
      const values = now.map(one => one.value).sort((a, b) => a - b);
      if (values.length) {
        const middle = (values[(values.length - 1) >> 1] + values[values.length >> 1]) / 2;
        add(quantity(middle, chart.unit), 'hvd-chart-now', now.length > 1 ? t('median of %1 ranks', now.length) : '');
        const far = now.reduce((a, b) => (Math.abs(b.value - middle) > Math.abs(a.value - middle) ? b : a));
        if (now.length > 1 && !short && Math.abs(far.value - middle) > Math.max(Math.abs(middle), 1e-12) * 0.02) rows.push(this.furthest(far.rank, far.value));
      }
    }
    this.value.replaceChildren(...rows);
    this.root.setAttribute('aria-label', `${titleOf(chart.id)}: ${this.value.textContent}`);
  }

  private furthest(rank: number, value: number): HTMLElement {
    const title = t('Furthest from the median. Click to show this rank before the others');
    const one = h('button', { type: 'button', class: 'hvd-chart-far hvd-faint', title }, t('rank %1: %2', rank, quantity(value, this.chart.unit)));
    one.addEventListener('click', () => this.choose(rank));
    return one;
  }

  /** Each rank's last value up to a time. */
  at(time: number): { rank: number; value: number }[] {
    const found = [];
    for (const one of this.series()) {
      const i = one.before(time);
      if (i >= 0 && !Number.isNaN(one.value[i])) found.push({ rank: one.rank, value: one.value[i] });
    }
    return found;
  }
}

export function shareColours(palette: Palette): Rgb[] {
  return [mixed(palette.kinds[1], palette.background, palette.dark ? 0.55 : 0.5), palette.kinds[0], palette.wait];
}

export function shareName(name: string): string {
  const names: Record<string, () => string> = { compute: () => t('compute'), transfer: () => t('transfer'), wait: () => t('wait') };
  return names[name.slice(SHARES.length)]?.() ?? name;
}

/** Two grids as one, each line at its own times. */
function merged(a: Grid, b: Grid): Grid {
  if (!b.lines.length) return a;
  const [x, ...lines] = uPlot.join([[a.x, ...a.lines] as uPlot.AlignedData, [b.x, ...b.lines] as uPlot.AlignedData]) as unknown as [number[], ...Grid['lines']];
  return { ...a, x, lines: lines.map(widened) };
}

const MOST = 12;
const ENDS = 4;

interface Value {
  rank: number;
  value: number;
  step: number;
  time: number;
}

/** The measured value of each rank that is nearest to a time, at most `slack` away. */
export function valuesAt(series: readonly Series[], time: number, slack: number): Value[] {
  const found = [];
  for (const one of series) {
    const i = one.nearest(time);
    if (i >= 0 && Math.abs(one.time[i] - time) <= slack) found.push({ rank: one.rank, value: one.value[i], step: one.step[i], time: one.time[i] });
  }
  return found;
}

/** What was measured near a time, as a table. */
export function tipFor(view: ChartView, time: number, slack: number, palette: Palette, ranks: readonly number[], chosen: ReadonlySet<number>): HTMLElement[] {
  const { chart } = view;
  if (chart.kind === 'shares') return shares(view, time, slack, palette, chosen);
  const values = valuesAt(view.series(), time, slack);
  if (!values.length) return [];
  const steps = [...new Set(values.map(one => one.step).filter(step => !Number.isNaN(step)))];
  const head = `${(values[0].time / 1e9).toFixed(2)} s${steps.length === 1 ? ` · ${t('step %1', number(steps[0]))}` : ''}`;
  const rows = few(values, chosen).map(one => row(chart, one, palette, ranks));
  return [h('div', { class: 'hvd-tip-name' }, titleOf(chart.id), h('span', { class: 'hvd-faint' }, ` ${head}`)), h('div', { class: 'hvd-tip-values' }, ...rows)];
}

function row(chart: Chart, one: Value | string, palette: Palette, ranks: readonly number[]): HTMLElement {
  if (typeof one === 'string') return h('div', { class: 'hvd-faint' }, one);
  const colour = css(rankColour(ranks.indexOf(one.rank), palette));
  return h('div', {}, h('i', { class: 'hvd-dot', style: `background:${colour}` }), h('span', {}, t('rank %1', one.rank)), h('b', {}, quantity(one.value, chart.unit)));
}

/** All by rank if they are few; otherwise the chosen ones, and the greatest and the least. */
function few(values: Value[], chosen: ReadonlySet<number>): (Value | string)[] {
  if (values.length <= MOST) return values;
  const sorted = [...values].sort((a, b) => b.value - a.value);
  const picked = sorted.filter((one, i) => i < ENDS || i >= sorted.length - ENDS || chosen.has(one.rank));
  const after = picked.findIndex((one, i) => i >= ENDS - 1 && !chosen.has(one.rank));
  return [...picked.slice(0, after + 1), t('… %1 more', values.length - picked.length), ...picked.slice(after + 1)];
}

function shares(view: ChartView, time: number, slack: number, palette: Palette, chosen: ReadonlySet<number>): HTMLElement[] {
  const colours = shareColours(palette);
  let at = NaN;
  let ranks = 0;
  const rows = view.stacked.map((name, i) => {
    const values = valuesAt(view.series(name).filter(one => !chosen.size || chosen.has(one.rank)), time, slack);
    if (!values.length) return null;
    at = values[0].time;
    ranks = values.length;
    const mean = values.reduce((sum, one) => sum + one.value, 0) / values.length;
    return h('div', {}, h('i', { class: 'hvd-dot', style: `background:${css(colours[i])}` }), h('span', {}, shareName(name)), h('b', {}, quantity(mean, '1')));
  });
  if (Number.isNaN(at)) return [];
  const begin = (at - 5e8) / 1e9;
  const head = ` ${begin.toFixed(1)}–${(begin + 1).toFixed(1)} s · ${ranks === 1 ? t('rank %1', [...chosen][0] ?? 0) : t('mean of %1 ranks', ranks)}`;
  return [h('div', { class: 'hvd-tip-name' }, titleOf(view.chart.id), h('span', { class: 'hvd-faint' }, head)), h('div', { class: 'hvd-tip-values' }, ...rows.filter(one => one !== null))];
}
