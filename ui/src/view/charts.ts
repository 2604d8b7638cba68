import { ticks } from '../draw/format.ts';
import { css, rankColour, rankDash, type Palette } from '../draw/palette.ts';
import { Borders, chartsOf, type Chart } from '../model/charts.ts';
import type { Store } from '../model/store.ts';
import type { Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { ChartView, LINES, titleOf, tipFor, valuesAt, type Look } from './chart.ts';
import { button, h, watchTheme } from './dom.ts';
import type { ChartsView } from './options.ts';

export interface ChartsOptions {
  /** Pixels left of the time axis. */
  gutter?: number;
  /** Height of each chart. */
  height?: number;
  /** Whether to draw a time axis on top; not if there is one already, over the lanes. */
  axis?: boolean;
  /** The view was moved from here; by default the element dispatches `hvd-moved`. */
  moved?: () => void;
}

/** Milliseconds of a frame for charts; what is not drawn by then has to wait for the next one. */
const BUDGET = 4;
/** A frame in which so many ms are gone has no time for charts, unless none was drawn for `PATIENCE` ms. */
const FULL = 6;
const PATIENCE = 80;
/** After so many ms without a change nothing moves any more. */
const STILL = 150;
const NEAR = 40; // pixels

/** Charts of all series, on the time axis of a {@link Viewport}. */
export class Charts implements ChartsView {
  readonly root: HTMLElement;
  gutter: number;
  private readonly store: Store;
  private readonly view: Viewport;
  private readonly height: number;
  private readonly moved: () => void;
  private readonly chips = h('div', { class: 'hvd-chips', role: 'group' });
  private readonly choices = h('div', { class: 'hvd-choices', hidden: '' });
  private readonly axis: HTMLCanvasElement | null;
  private readonly list = h('div', { class: 'hvd-chart-list' });
  private readonly line = h('div', { class: 'hvd-crosshair', hidden: '' });
  private readonly tip = h('div', { class: 'hvd-tip', hidden: '' });
  private readonly all = new Map<string, ChartView>();
  private readonly asked = new Map<string, boolean>();
  private readonly chosen = new Set<number>();
  private pointed: number | null = null;
  private ranks: number[] = [];
  private palette!: Palette;
  private known = -1;
  private drawn = '';
  private turn = 0;
  private frame = 0;
  private across = 0;
  /** Which frame it is, and what is left of the time it has for charts. */
  private budgetOf = NaN;
  private budget = 0;
  private changed = 0;
  /** When a chart was drawn last. */
  private last = 0;
  private readonly pace = new Pace();
  private readonly borders = new Borders();
  private pointer: { x: number; y: number } | null = null;
  private readonly seen: IntersectionObserver;
  private readonly ends: (() => void)[] = [];
  /** Lengths of draws in ms, while `on`: what benchmarks read. */
  readonly timings = { draw: [] as number[], on: false };

  constructor(parent: HTMLElement, store: Store, view: Viewport, options: ChartsOptions = {}) {
    this.store = store;
    this.view = view;
    this.gutter = options.gutter ?? 132;
    this.height = options.height ?? 84;
    this.axis = options.axis ? (h('canvas', { class: 'hvd-chart-axis', 'aria-hidden': 'true' }) as HTMLCanvasElement) : null;
    this.chips.setAttribute('aria-label', t('Ranks in the charts'));
    const choose = button(t('Charts ▾'), t('Choose what is shown'), () => this.showChoices(this.choices.hidden));
    const bar = h('div', { class: 'hvd-charts-bar' }, this.chips, h('span', { class: 'hvd-buttons' }, choose), this.choices);
    this.root = h('div', { class: 'hvd-charts-view', tabindex: '0', 'aria-label': t('Charts of what the ranks measured. Arrow keys move, plus and minus zoom.') }, bar, this.axis, this.list, this.tip);
    this.list.append(this.line);
    parent.append(this.root);
    this.moved = options.moved ?? (() => this.root.dispatchEvent(new CustomEvent('hvd-moved', { bubbles: true })));
    this.seen = new IntersectionObserver(entries => this.scrolled(entries), { root: this.list, rootMargin: '60px' });
    this.ends.push(
      () => this.seen.disconnect(),
      watchTheme(this.root, palette => {
        this.palette = palette;
        this.known = -1;
        this.draw();
      }),
      listenToCharts(this.root, this.list, view, {
        hover: (x, y) => this.hover(x, y),
        moved: () => this.moved(),
        gutter: () => this.gutter,
        width: () => this.width,
      }),
    );
    this.choices.addEventListener('keydown', event => {
      if (event.key !== 'Escape') return;
      event.stopPropagation();
      this.showChoices(false);
      choose.focus();
    });
    this.root.addEventListener('focusout', event => {
      if (!this.root.contains(event.relatedTarget as Node | null)) this.showChoices(false);
    });
  }

  get empty(): boolean {
    return !this.store.series.all.length;
  }

  /** The page's own way to ask what is shown; tests read it. */
  get api() {
    return {
      charts: () => [...this.all.values()].map(one => ({ id: one.chart.id, title: titleOf(one.chart.id), ranks: one.series().map(series => series.rank), label: one.root.getAttribute('aria-label') })),
      values: (name: string, rank: number) => {
        const series = this.store.series.of(rank, name);
        return series ? Array.from({ length: series.n }, (_, i) => ({ time: series.time[i], value: series.value[i], step: series.step[i] })) : [];
      },
      at: (name: string, time: number) => valuesAt(this.store.series.named.get(name) ?? [], time, Infinity),
      choose: (rank: number) => this.choose(rank),
      show: (id: string, on: boolean) => this.show(id, on),
      charts_view: this,
    };
  }

  /** Of the time axis, as it was when the frame began: asking the page after something was changed makes it lay all out. */
  private get width(): number {
    return Math.max(1, this.across - this.gutter);
  }

  /** Draws what is not as it should be any more, in this frame or in the next ones. */
  draw(): void {
    if (this.empty || !this.palette || !this.root.isConnected) return;
    this.across = this.root.clientWidth;
    if (this.across < 80) return;
    const { store, view } = this;
    if (this.known !== store.series.all.length) this.arrange();
    this.borders.update(store);
    const key = `${store.series.version} ${this.borders.version} ${view.from} ${view.to} ${this.across} ${this.gutter} ${devicePixelRatio}`;
    if (key !== this.drawn) {
      this.drawn = key;
      this.changed = performance.now();
      for (const one of this.all.values()) one.move();
      this.drawAxis();
      this.showPointer();
    }
    this.some();
  }

  dispose(): void {
    for (const end of this.ends) end();
    cancelAnimationFrame(this.frame);
    for (const one of this.all.values()) one.dispose();
    this.root.remove();
  }

  // -- drawing --------------------------------------------------------------------------------------------------------

  /** Draws as many as this frame has time for; the others are where they belong, if not as sharp or new, until their turn. */
  private some(): void {
    // What came since the last draw may be of ranks that have no colour yet.
    if (this.known !== this.store.series.all.length) return this.draw();
    const waiting = [...this.all.values()].filter(one => one.stale && one.visible);
    if (!waiting.length) return;
    const begun = performance.now();
    const still = begun - this.changed > STILL;
    if (still) this.pace.hurry();
    // The timeline and the charts may both ask in one frame.
    const frame = Number(document.timeline.currentTime);
    if (frame !== this.budgetOf) [this.budgetOf, this.budget] = [frame, BUDGET];
    let done = 0;
    const full = !still && begun - frame > FULL && begun - this.last < PATIENCE;
    if (this.budget > 0 && !full && this.pace.ready(begun)) {
      const look = this.look();
      const most = Math.min(waiting.length, this.pace.most);
      do waiting[(this.turn + done) % waiting.length].draw(look);
      while (++done < most && performance.now() - begun < this.budget);
      this.turn = done < waiting.length ? this.turn + done : 0;
      this.last = performance.now();
      const took = this.last - begun;
      this.budget -= took;
      if (this.timings.on) this.timings.draw.push(took);
    }
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      const now = performance.now();
      if (done) this.pace.told(now - begun, now);
      this.some();
    });
  }

  private look(): Look {
    const chosen = this.pointed === null ? this.chosen : new Set([...this.chosen, this.pointed]);
    return { palette: this.palette, gutter: this.gutter, width: this.width, height: this.height, ranks: this.ranks, chosen, borders: this.borders };
  }

  private again(): void {
    this.drawn = '';
    this.draw();
  }

  /** There are other series than before. */
  private arrange(): void {
    const { series } = this.store;
    this.known = series.all.length;
    this.ranks = [...new Set(series.all.map(one => one.rank))].sort((a, b) => a - b);
    const charts = chartsOf(series);
    const shown = charts.filter(chart => this.asked.get(chart.id) ?? chart.shown);
    for (const [id, one] of this.all)
      if (!shown.some(chart => chart.id === id)) {
        this.seen.unobserve(one.root);
        one.dispose();
        this.all.delete(id);
      }
    for (const chart of shown) {
      let one = this.all.get(chart.id);
      if (!one) {
        one = new ChartView(chart, series, this.view, rank => this.choose(rank));
        this.seen.observe(one.root);
      }
      one.chart = chart;
      this.all.delete(chart.id);
      this.all.set(chart.id, one);
      this.list.append(one.root);
    }
    this.drawn = '';
    this.drawChips();
    this.drawChoices(charts);
  }

  private scrolled(entries: IntersectionObserverEntry[]): void {
    for (const entry of entries)
      for (const one of this.all.values()) {
        if (one.root !== entry.target) continue;
        if (entry.isIntersecting && !one.visible) one.appear();
        one.visible = entry.isIntersecting;
      }
    this.some();
  }

  private drawAxis(): void {
    if (!this.axis) return;
    const { palette, view, gutter, width } = this;
    const ratio = Math.min(3, devicePixelRatio || 1);
    const height = 22;
    this.axis.width = Math.round((gutter + width) * ratio);
    this.axis.height = Math.round(height * ratio);
    this.axis.style.height = `${height}px`;
    const g = this.axis.getContext('2d')!;
    g.scale(ratio, ratio);
    g.font = '11px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif';
    g.textAlign = 'center';
    g.textBaseline = 'middle';
    for (const tick of ticks(view.from, view.to, width)) {
      const x = gutter + ((tick.at - view.from) / view.length) * width;
      g.fillStyle = css(palette.text, 0.09);
      g.fillRect(Math.round(x), height - 5, 1, 5);
      g.fillStyle = css(palette.faint);
      if (x > gutter + 20 && x < gutter + width - 24) g.fillText(tick.text, x, height / 2 - 1);
    }
  }

  // -- ranks ----------------------------------------------------------------------------------------------------------

  private drawChips(): void {
    const band = this.ranks.length > LINES;
    this.chips.replaceChildren(
      ...this.ranks.map((rank, place) => {
        const colour = css(rankColour(place, this.palette));
        const [dash] = rankDash(place);
        const swatch = h('i', { class: 'hvd-line', style: `border-top:${dash ? '2px dashed' : '3px solid'} ${colour}` });
        const chip = h('button', { type: 'button', class: 'hvd-chip', 'aria-pressed': String(this.chosen.has(rank)), title: t('Show rank %1 before the others', rank) }, (!band || this.chosen.has(rank)) && swatch, band ? String(rank) : t('rank %1', rank));
        chip.addEventListener('click', () => this.choose(rank));
        chip.addEventListener('pointerenter', () => this.point(rank));
        chip.addEventListener('pointerleave', () => this.point(null));
        return chip;
      }),
    );
    if (band) this.chips.prepend(h('span', { class: 'hvd-faint' }, t('median and range of all; ranks')));
  }

  private choose(rank: number): void {
    if (!this.chosen.delete(rank)) this.chosen.add(rank);
    [...this.chips.querySelectorAll('.hvd-chip')].forEach((chip, i) => chip.setAttribute('aria-pressed', String(this.chosen.has(this.ranks[i]))));
    this.again();
  }

  private point(rank: number | null): void {
    this.pointed = rank;
    this.again();
  }

  // -- which charts ---------------------------------------------------------------------------------------------------

  private showChoices(on: boolean): void {
    this.choices.hidden = !on;
    if (on) (this.choices.querySelector('input') as HTMLElement | null)?.focus();
  }

  private drawChoices(charts: Chart[]): void {
    const opened = !this.choices.hidden;
    if (opened && this.choices.childElementCount === charts.length) return;
    this.choices.replaceChildren(
      ...charts.map(chart => {
        const box = h('input', { type: 'checkbox' }) as HTMLInputElement;
        box.checked = this.asked.get(chart.id) ?? chart.shown;
        box.addEventListener('change', () => this.show(chart.id, box.checked));
        return h('label', { title: chart.id }, box, titleOf(chart.id));
      }),
    );
  }

  private show(id: string, on: boolean): void {
    this.asked.set(id, on);
    this.known = -1;
    this.draw();
  }

  // -- pointer --------------------------------------------------------------------------------------------------------

  private hover(x: number, y: number): void {
    this.pointer = x >= 0 && x <= this.width ? { x, y } : null;
    this.showPointer();
  }

  private showPointer(): void {
    const { pointer, view, tip, line } = this;
    line.hidden = !pointer;
    const chart = pointer && [...this.all.values()].find(one => inside(one.root, pointer.y));
    if (!pointer || !chart) {
      tip.hidden = true;
      return;
    }
    line.style.transform = `translateX(${this.gutter + pointer.x}px)`;
    line.style.height = `${this.list.scrollHeight}px`;
    const time = view.from + (pointer.x / this.width) * view.length;
    const slack = Math.max(chart.chart.kind === 'shares' ? 5e8 : 0, (NEAR / this.width) * view.length, 'ns' in chart.chart.gap && chart.chart.gap.ns < 5e9 ? chart.chart.gap.ns / 2 : 0);
    const look = this.look();
    const content = tipFor(chart, time, slack, this.palette, this.ranks, look.chosen);
    tip.hidden = !content.length;
    if (tip.hidden) return;
    tip.replaceChildren(...content);
    const box = this.root.getBoundingClientRect();
    const left = this.gutter + pointer.x + 14;
    const right = left + tip.offsetWidth > box.width;
    const top = pointer.y - box.top + 14;
    const under = top + tip.offsetHeight > box.height;
    tip.style.transform = `translate(${Math.round(right ? this.gutter + pointer.x - tip.offsetWidth - 12 : left)}px, ${Math.round(under ? Math.max(0, top - tip.offsetHeight - 26) : top)}px)`;
  }
}

function inside(element: HTMLElement, y: number): boolean {
  const box = element.getBoundingClientRect();
  return y >= box.top && y < box.bottom;
}

/** A frame that took longer than this, in ms, has made the reader wait for the next one. */
const LATE = 25;
/** How many times as long as such a frame nothing is drawn, at least and at most in ms: so that few frames are late. */
const REST = 20;
const LONGEST = 450;
const MOST = 8;
const TRUSTED = 8;

/**
 * How many pictures may be drawn in a frame, and when. What a script gives to a canvas takes most of its time after the
 * script has ended, so only the length of whole frames measures its cost.
 */
export class Pace {
  /** Pictures in one frame. */
  most = 2;
  private until = 0;
  private good = 0;

  /** Whether it is time for more; times in ms. */
  ready(now: number): boolean {
    return now >= this.until;
  }

  /** The frame in which something was drawn lasted `ms`. */
  told(ms: number, now: number): void {
    if (ms <= LATE) {
      if (++this.good < TRUSTED) return;
      this.good = 0;
      this.most = Math.min(MOST, this.most + 1);
      return;
    }
    this.good = 0;
    this.most = Math.max(1, this.most >> 1);
    this.until = now + Math.min(LONGEST, REST * ms);
  }

  /** Nothing moves any more: draw what there is. */
  hurry(): void {
    this.until = 0;
  }
}

export interface ChartCommands {
  /** Pixels right of the beginning of the time axis; `NaN` once the pointer is elsewhere. */
  hover(x: number, y: number): void;
  moved(): void;
  gutter(): number;
  width(): number;
}

/** Lets pointer and keys move the view; returns what ends it. */
export function listenToCharts(root: HTMLElement, list: HTMLElement, view: Viewport, commands: ChartCommands): () => void {
  const end = new AbortController();
  const options = { signal: end.signal };
  const place = (event: MouseEvent) => event.clientX - list.getBoundingClientRect().left - commands.gutter();
  let drag: { id: number; last: number } | null = null;
  list.addEventListener(
    'pointerdown',
    event => {
      if (event.button !== 0 || place(event) < 0) return;
      drag = { id: event.pointerId, last: event.clientX };
      list.setPointerCapture(event.pointerId);
      root.focus({ preventScroll: true });
    },
    options,
  );
  list.addEventListener(
    'pointermove',
    event => {
      if (drag?.id === event.pointerId && event.clientX !== drag.last) {
        view.pan(((drag.last - event.clientX) / commands.width()) * view.length);
        drag.last = event.clientX;
        commands.moved();
      }
      commands.hover(place(event), event.clientY);
    },
    options,
  );
  for (const name of ['pointerup', 'pointercancel'] as const) list.addEventListener(name, () => (drag = null), options);
  list.addEventListener('pointerleave', () => commands.hover(NaN, 0), options);
  list.addEventListener(
    'wheel',
    event => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // The list itself may be scrolled, so that here the wheel zooms with Ctrl only.
      if ((!sideways && !event.ctrlKey && !event.metaKey) || place(event) < 0) return;
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (sideways) view.pan((((event.deltaX || event.deltaY) * lines) / commands.width()) * view.length);
      else view.zoom(Math.exp(event.deltaY * lines * 0.0018), view.from + (place(event) / commands.width()) * view.length);
      commands.moved();
    },
    { ...options, passive: false },
  );
  root.addEventListener(
    'keydown',
    event => {
      if (event.target !== root || event.ctrlKey || event.metaKey || event.altKey || !press(event.key.toLowerCase(), event.shiftKey, view)) return;
      event.preventDefault();
      event.stopPropagation();
      commands.moved();
    },
    options,
  );
  return () => end.abort();
}

function press(key: string, shift: boolean, view: Viewport): boolean {
  const far = shift ? 0.5 : 0.12;
  if (['w', '+', '='].includes(key)) view.zoom(1 / 1.25);
  else if (['s', '-', '_'].includes(key)) view.zoom(1.25);
  else if (['a', 'arrowleft'].includes(key)) view.pan(-view.length * far);
  else if (['d', 'arrowright'].includes(key)) view.pan(view.length * far);
  else if (key === 'f') view.fit();
  else if (key === ' ') view.follow(!view.following);
  else return false;
  return true;
}
