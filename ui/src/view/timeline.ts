import { count } from '../draw/format.ts';
import type { Palette } from '../draw/palette.ts';
import type { Liveness } from '../model/liveness.ts';
import { statistics, type Statistics } from '../model/statistics.ts';
import { runs, STOPPED, type Store } from '../model/store.ts';
import { extentOf } from '../model/track_events.ts';
import { Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { Tip } from './details.ts';
import { h, FailuresBox, standingText, watchTheme } from './dom.ts';
import { Minimap } from './minimap.ts';
import type { Actions, ChartsView, TimelineOptions } from './options.ts';
import { Scene } from './scene.ts';
import { Selection, listen, actionOf, Panel } from './selection.ts';
import { helpBox, Legend, Toolbar } from './toolbar.ts';

const HEIGHT = 420;
const SMOOTH = 0.28;
const TEXTS_EVERY = 300; // ms
/** While filling its place, the lanes leave this share of it to what is said below them, and take at least that one. */
const BELOW = 0.36;
const BELOW_CHARTS = 0.24;
const LOWEST = 0.28;
/** A lane that is not lower than this has a name that can be read. */
const READABLE = 22;
const MOST_FOR_READABLE = 0.45;
/** Charts are shown by themselves where there is this much. */
const ENOUGH_FOR_CHARTS = 560;
const HIGHEST_LANE = 56;
/** Share of the view that is free at the right when nothing runs, so that marks of the end are whole. */
const ROOM = 0.03;
/** In less width than this, tables leave out what can be read elsewhere. */
const LITTLE = 480;

/** One view of a store: toolbar, minimap, lanes, charts, legend and details. */
export class Timeline {
  readonly root: HTMLElement;
  readonly store: Store;
  readonly view: Viewport;
  readonly api;
  /** Lengths of the last draws, in ms: what benchmarks read. */
  readonly timings = { draw: [] as number[], on: false };
  private readonly options: TimelineOptions;
  private readonly actions: Actions;
  private readonly scene: Scene;
  private readonly selection: Selection;
  private readonly toolbar: Toolbar;
  private readonly minimap: Minimap;
  private readonly chartsPlace = h('div', { class: 'hvd-charts', hidden: '' });
  private charts: ChartsView | null = null;
  /** What the reader or the page asked for, if they did. */
  private wantsCharts: boolean | undefined;
  private readonly legend = new Legend();
  private readonly panel: Panel;
  private readonly tip = new Tip();
  private readonly failures = new FailuresBox();
  private readonly help = helpBox();
  private readonly plot: HTMLElement;
  private readonly spoken = h('div', { class: 'hvd-unseen', 'aria-live': 'polite' });
  private readonly ends: (() => void)[] = [];
  private readonly still = matchMedia('(prefers-reduced-motion: reduce)');
  private palette!: Palette;
  private frame = 0;
  private slow = 0;
  private visible = true;
  private hidden = false;
  private room = 0;
  private shownEnd = -Infinity;
  private toldVersion = -1;
  private toldMoments = -1;
  private cleared = 0;
  private past = '';

  constructor(parent: HTMLElement, store: Store, options: TimelineOptions = {}) {
    this.store = store;
    this.options = options;
    this.view = options.view ?? new Viewport();
    this.actions = options.actions ?? {};
    const canvas = h('canvas', {
      tabindex: '0',
      role: 'application',
      'aria-roledescription': t('timeline'),
      'aria-label': t('Collectives of each rank over time. Arrow keys move, plus and minus zoom, brackets go from one collective to the next, question mark tells all keys.'),
    }) as HTMLCanvasElement;
    this.wantsCharts = options.withCharts;
    this.scene = new Scene(canvas, store, this.view);
    this.selection = new Selection(this.scene, text => (this.spoken.textContent = text));
    this.panel = new Panel(this.scene, this.selection, this.actions, change => this.act(change));
    this.minimap = new Minimap(store, this.view, change => this.act(change));
    this.toolbar = this.makeToolbar();
    canvas.setAttribute('aria-describedby', this.toolbar.status.id);
    this.plot = h('div', { class: 'hvd-plot' }, canvas);
    this.root = h('div', { class: `hvd-view hvd-timeline${options.fill ? ' hvd-fill-parent' : ''}`, role: 'region', 'aria-label': options.title ?? t('Timeline') });
    this.root.append(this.toolbar.root, this.failures.root, this.minimap.root, this.plot, this.legend.root, this.chartsPlace, this.panel.root, this.tip.root, this.help, this.spoken);
    parent.append(this.root);
    this.api = viewApi(this, store, this.view, this.scene);
    this.listen();
    this.data();
  }

  /** The store has changed. */
  data(): void {
    const { store, view } = this;
    this.failures.update(store.failures);
    if (this.cleared !== store.cleared) {
      this.cleared = store.cleared;
      this.selection.forget();
      this.hover(-1, -1);
    }
    const extent = this.extent();
    if (extent) {
      const glides = view.following && Number.isFinite(this.shownEnd);
      view.data(extent[0], glides ? Math.max(this.shownEnd, view.extent[1]) : extent[1]);
    }
    this.schedule();
  }

  /** Stop drawing while the timeline is out of sight, or resume. */
  hide(hidden: boolean): void {
    this.hidden = hidden;
    this.schedule();
  }

  /** The kernel speaks, or does not any more: then the timeline does not say that it is live. */
  stand(liveness: Liveness): void {
    const text = standingText(liveness);
    if (text === this.past) return;
    this.past = text;
    this.toolbar.following(this.view.following, this.gone);
  }

  /** What there is to see, and whether the view leaves room behind it: nothing moves then that would need it. */
  private extent(): [number, number] | null {
    const { store, view, scene } = this;
    scene.events.update(store);
    view.room = this.gone || !runs(store) ? ROOM : 0;
    return extentOf(store, scene.events, view.span / 2);
  }

  /** Why nothing more comes, now or ever: the ranks are gone, or the kernel can't be heard. */
  private get gone(): string {
    return this.past || (this.store.heading === STOPPED ? t('ended') : '');
  }

  /** Says something to the reader, for some seconds. */
  tell(text: string): void {
    this.toolbar.tell(text);
  }

  dispose(): void {
    for (const end of this.ends) end();
    this.scene.dispose();
    this.minimap.dispose();
    this.toolbar.dispose();
    this.charts?.dispose();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.slow);
    this.frame = -1;
    this.root.remove();
  }

  private makeToolbar(): Toolbar {
    const { view, selection } = this;
    const commands = {
      follow: () => this.act(() => view.follow(!view.following)),
      zoom: (factor: number) => this.act(() => view.zoom(factor)),
      fit: () => this.act(() => view.fit()),
      help: () => this.toggleHelp(),
      charts: this.options.charts && (() => this.toggleCharts()),
      search: (text: string) => {
        const names = selection.search(text);
        this.toolbar.matches(names < 0 ? '' : names === 1 ? t('1 name') : t('%1 names', count(names)));
        this.schedule();
      },
      next: (back: boolean) => this.act(() => selection.next(back)),
      leave: () => this.scene.canvas.focus(),
    };
    return new Toolbar(this.options.title ?? t('Timeline'), commands, this.actions);
  }

  private toggleHelp(on = this.help.hidden): void {
    this.help.hidden = !on;
  }

  private listen(): void {
    const { scene, view, selection } = this;
    this.ends.push(
      listen(scene, {
        zoom: (factor, x) => this.act(() => view.zoom(factor, x === undefined ? undefined : scene.time(x))),
        pan: pixels => this.act(() => view.pan(pixels * scene.pixel)),
        hover: (x, y) => this.hover(x, y),
        leave: () => this.hover(-1, -1),
        click: (x, y) => {
          scene.canvas.focus({ preventScroll: true });
          this.act(() => selection.at(x, y));
        },
        range: (from, to) =>
          this.act(() => {
            view.following = false;
            selection.between(scene.time(Math.max(scene.gutter, Math.min(from, to))), scene.time(Math.max(from, to)));
          }),
        key: (key, shift) => this.key(key, shift),
      }),
      watchTheme(this.root, palette => {
        this.palette = palette;
        this.schedule();
      }),
    );
    // JupyterLab's keys for cells must not act on the notebook while the timeline has the focus; Ctrl-S and the like must.
    const guard = (event: KeyboardEvent) => this.root.toggleAttribute('data-lm-suppress-shortcuts', !event.ctrlKey && !event.metaKey);
    for (const name of ['keydown', 'keyup'] as const) this.root.addEventListener(name, guard, true);
    this.root.toggleAttribute('data-lm-suppress-shortcuts', true);
    const resized = new ResizeObserver(() => {
      this.room = 0;
      this.schedule();
    });
    resized.observe(this.root);
    const seen = new IntersectionObserver(entries => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.schedule();
    });
    seen.observe(this.root);
    this.root.addEventListener('hvd-moved', () => this.schedule());
    this.ends.push(
      () => resized.disconnect(),
      () => seen.disconnect(),
    );
  }

  private key(key: string, shift: boolean): boolean {
    const act = actionOf(key, shift, this.view, this.selection, {
      search: () => this.toolbar.search.focus(),
      help: () => this.toggleHelp(),
      charts: () => this.options.charts && this.toggleCharts(),
      open: () => this.selection.site && this.actions.open?.(this.selection.site),
      forget: () => {
        this.selection.forget();
        this.toggleHelp(false);
      },
    });
    if (act) this.act(act);
    return act !== undefined;
  }

  /** Does what changes the view or what is chosen. */
  private act(change: () => void): void {
    const followed = this.view.following;
    const chosen = this.chosen;
    change();
    if (followed && this.view.following) this.shownEnd = this.view.extent[1];
    if (this.chosen.some((one, i) => one !== chosen[i])) this.panel.update(this.palette);
    this.schedule();
  }

  private get chosen() {
    const { selected, range } = this.selection.overlay;
    return [selected, range];
  }

  private hover(x: number, y: number): void {
    const { overlay } = this.selection;
    const hit = this.selection.hitAt(x, y);
    const cell = hit ? null : this.scene.cellAt(x, y);
    const before = overlay.hover;
    overlay.hover = hit;
    if (hit) this.tip.hit(this.store, hit);
    else if (cell) this.tip.cell(cell, this.scene.now);
    else this.tip.hide();
    // In the whole view, of which the lanes may be a low part.
    if (hit || cell) this.tip.place(x, y + this.plot.offsetTop - this.plot.scrollTop, this.scene.width, this.root.clientHeight);
    if (hit || before) this.schedule();
  }

  // -- drawing --------------------------------------------------------------------------------------------------------

  schedule(): void {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.paint());
  }

  private paint(): void {
    this.frame = 0;
    if (!this.visible || this.hidden || !this.root.isConnected) return;
    const begun = this.timings.on ? performance.now() : 0;
    const width = this.root.clientWidth;
    if (width < 40) return;
    const room = width < LITTLE ? 'little' : 'enough';
    if (this.root.dataset.room !== room) this.root.dataset.room = room;
    this.advance();
    if (this.options.fill) this.scene.resize(width, (this.room ||= this.measure()), HIGHEST_LANE);
    else this.scene.resize(width, this.options.height ?? HEIGHT);
    this.scene.draw(this.palette, this.selection.overlay);
    if (this.minimap.draw(this.palette, width, this.scene.gutter)) this.schedule();
    this.drawCharts();
    if (this.timings.on) this.timings.draw.push(performance.now() - begun);
    if (!this.slow) this.slow = window.setTimeout(() => this.texts(), this.toldVersion < 0 ? 0 : TEXTS_EVERY);
  }

  private drawCharts(): void {
    const { chartsPlace: place, options } = this;
    const wanted = this.wantsCharts ?? (!!options.fill && this.root.clientHeight >= ENOUGH_FOR_CHARTS);
    const shown = wanted && !!options.charts && this.store.series.all.length > 0;
    if (shown && !this.charts) this.charts = options.charts!(place, this.store, this.view);
    if (place.hidden === shown) {
      place.hidden = !shown;
      this.toolbar.charts(shown);
      this.room = 0;
    }
    if (!shown || !this.charts) return;
    this.charts.gutter = this.scene.gutter;
    this.charts.draw();
  }

  private toggleCharts(): void {
    this.wantsCharts = this.chartsPlace.hidden;
    this.schedule();
  }

  /** What is left for the lanes in a place of fixed height. */
  private measure(): number {
    const others = [this.toolbar.root, this.failures.root, this.minimap.root, this.legend.root, this.chartsPlace].reduce((sum, one) => sum + one.offsetHeight, 0);
    const all = this.root.clientHeight;
    const below = all * (this.chartsPlace.hidden ? BELOW : BELOW_CHARTS);
    const readable = Math.min(all * MOST_FOR_READABLE, this.scene.top + READABLE * this.store.lanes.length);
    return Math.max(all * LOWEST, readable, all - others - Math.min(this.panel.contentHeight, below));
  }

  /** Glide to the newest rows while following. */
  private advance(): void {
    const { view } = this;
    const extent = this.extent();
    if (!view.following || !extent) return;
    const [begin, target] = extent;
    const gap = target - this.shownEnd;
    const near = !(gap > this.scene.pixel * 0.5) || gap > view.span || this.still.matches;
    this.shownEnd = near ? target : this.shownEnd + gap * SMOOTH;
    view.data(begin, this.shownEnd);
    if (!near) this.schedule();
  }

  /** Update the parts that need not change with every frame. */
  private texts(): void {
    this.slow = 0;
    const { store } = this;
    const changed = this.toldVersion !== store.version;
    this.toldVersion = store.version;
    this.toolbar.following(this.view.following, this.gone);
    if (changed) this.toolbar.update(store);
    this.legend.update(store, this.palette);
    this.panel.update(this.palette);
    this.tellMoments();
    const room = this.options.fill ? this.measure() : 0;
    if (this.minimap.behind || room !== this.room) this.schedule();
    this.room = room;
  }

  /** Announce the ranks that joined, left or died since the last call. */
  private tellMoments(): void {
    const { moments } = this.scene.events;
    const news = this.toldMoments < 0 ? [] : moments.slice(this.toldMoments);
    this.toldMoments = moments.length;
    if (news.length) this.spoken.textContent = news.map(mark => mark.text).join('; ');
  }
}

/** The page's own way to ask what is shown; tests and benchmarks read it. */
export function viewApi<T>(timeline: T, store: Store, view: Viewport, scene: Scene) {
  return {
    store,
    view,
    timeline,
    summary: () => ({ spans: store.count, forgotten: store.forgotten, lost: store.lostBefore, lanes: store.lanes.map(lane => lane.rank), begin: store.begin, end: store.end }),
    statistics: (from = -Infinity, to = Infinity): Statistics => statistics(store, from, to),
    /** Return for each collective of a name which rank came last and how long after the first, in ns. */
    lateness: (name: string) => {
      const seen = new Map<number, { last: number; ns: number; ranks: number }>();
      for (const lane of store.lanes)
        for (let k = 0; k < lane.n; k++) {
          const came = store.names[lane.name[k]] === name ? store.operations.get(lane.op[k]) : undefined;
          if (came) seen.set(lane.op[k], { last: came.lastRank, ns: came.last - came.first, ranks: came.count });
        }
      return [...seen.entries()].sort((a, b) => a[0] - b[0]).map(([, one]) => one);
    },
    /** Where on the canvas the middle of a rank's lane is at a time. */
    where: (rank: number, time: number) => ({ x: scene.x(time), y: scene.middle(store.lane(rank)) }),
    /** Where the lane begins and how high it is. */
    lane: (rank: number) => scene.place(store.lane(rank)),
    hosts: () => scene.groups.all.map(group => ({ host: group.host, ranks: group.lanes.map(lane => lane.rank), collapsed: group.collapsed })),
  };
}
