import { count, duration, ranks as ranksText } from '../draw/format.ts';
import { css, type Palette } from '../draw/palette.ts';
import { search } from '../model/found.ts';
import { findNext, statistics, type Statistics } from '../model/statistics.ts';
import { KINDS, NOT_STARTED, type Store } from '../model/store.ts';
import { Viewport } from '../model/viewport.ts';
import { operationPanel, sentence, statisticsPanel, tooltip } from './details.ts';
import { button, h } from './dom.ts';
import { hitTest, indexOf, type Hit } from './hits.ts';
import { listen } from './input.ts';
import { Scene, type Overlay } from './scene.ts';
import { watchTheme } from './theme.ts';

const HELP = [
  ['W S, + −, wheel', 'zoom'],
  ['A D, ← →, drag', 'move'],
  ['Shift + drag', 'statistics of a stretch'],
  ['click', 'one collective on all ranks'],
  ['↑ ↓, [ ]', 'another rank, its next collective'],
  ['Space', 'follow what happens, or stand still'],
  ['F', 'everything'],
  ['/, Enter', 'search, next match'],
  ['Esc', 'forget the selection'],
];
const LIVE_ROWS = 40_000;
const SMOOTH = 0.28;

/** One view of a store: toolbar, canvas, legend and details. */
export class Timeline {
  readonly root: HTMLElement;
  readonly store: Store;
  readonly view: Viewport;
  private readonly scene: Scene;
  private readonly overlay: Overlay = { hover: null, selected: null, range: null, found: null, lane: -1 };
  private palette!: Palette;
  private readonly status = h('span', { class: 'hvd-status', role: 'status' });
  private readonly state = h('span', { class: 'hvd-state' });
  private readonly search = h('input', { type: 'search', placeholder: 'Search tensors', 'aria-label': 'Search tensors by name', spellcheck: 'false' }) as HTMLInputElement;
  private readonly found = h('span', { class: 'hvd-faint' });
  private readonly follow: HTMLButtonElement;
  private readonly tip = h('div', { class: 'hvd-tip', hidden: '' });
  private readonly legend = h('div', { class: 'hvd-legend' });
  private readonly details = h('div', { class: 'hvd-details' });
  private readonly spoken = h('div', { class: 'hvd-unseen', 'aria-live': 'polite' });
  private readonly help = h('dl', { class: 'hvd-help', hidden: '' });
  private readonly ends: (() => void)[] = [];
  private frame = 0;
  private slow = 0;
  private visible = true;
  private shownEnd = -Infinity;
  private drawnVersion = -1;
  private legendKey = '';
  /** Lengths of the last draws and the distances between frames, in ms: what benchmarks read. */
  readonly timings = { draw: [] as number[], on: false };
  private readonly height: number;
  private readonly still = matchMedia('(prefers-reduced-motion: reduce)');

  constructor(parent: HTMLElement, store: Store, options: { view?: Viewport; height?: number; title?: string } = {}) {
    this.store = store;
    this.view = options.view ?? new Viewport();
    this.height = options.height ?? 420;
    const canvas = h('canvas', {
      tabindex: '0',
      role: 'application',
      'aria-roledescription': 'timeline',
      'aria-label': 'Collectives of each rank over time. Arrow keys move, plus and minus zoom, brackets go from one collective to the next.',
    }) as HTMLCanvasElement;
    this.follow = button('', '', () => this.setFollowing(!this.view.following));
    this.follow.className = 'hvd-follow';
    const buttons = h(
      'span',
      { class: 'hvd-buttons' },
      this.follow,
      button('−', 'Zoom out (S)', () => this.act(() => this.view.zoom(1.6))),
      button('+', 'Zoom in (W)', () => this.act(() => this.view.zoom(1 / 1.6))),
      button('⤢', 'Show everything (F)', () => this.act(() => this.view.fit())),
      button('?', 'Keys', () => (this.help.hidden = !this.help.hidden)),
    );
    for (const [keys, what] of HELP) this.help.append(h('dt', {}, keys), h('dd', {}, what));
    const bar = h('div', { class: 'hvd-bar' }, h('strong', {}, options.title ?? 'Timeline'), this.state, this.status, h('span', { class: 'hvd-space' }), this.found, this.search, buttons);
    const plot = h('div', { class: 'hvd-plot' }, canvas, this.tip, this.help);
    this.root = h('div', { class: 'hvd-view hvd-timeline' }, bar, plot, this.legend, this.details, this.spoken);
    parent.append(this.root);
    this.scene = new Scene(canvas, store, this.view);
    this.listen();
    this.data();
  }

  /** The page's own way to ask what is shown; tests read it. */
  get api() {
    const { store } = this;
    return {
      store,
      view: this.view,
      timeline: this,
      summary: () => ({ spans: store.count, forgotten: store.forgotten, lost: store.lostBefore, lanes: store.lanes.map(l => l.rank), begin: store.begin, end: store.end }),
      statistics: (from = -Infinity, to = Infinity): Statistics => statistics(store, from, to),
      /** Of each collective of a name: who came last and how long after the first, in ns. */
      lateness: (name: string) => {
        const seen = new Map<number, { last: number; ns: number; ranks: number }>();
        for (const lane of store.lanes)
          for (let k = 0; k < lane.n; k++) {
            const came = store.names[lane.name[k]] === name ? store.operations.get(lane.op[k]) : undefined;
            if (came) seen.set(lane.op[k], { last: came.lastRank, ns: came.last - came.first, ranks: came.count });
          }
        return [...seen.entries()].sort((a, b) => a[0] - b[0]).map(([, one]) => one);
      },
      where: (rank: number, time: number) => ({ x: this.scene.x(time), y: this.scene.top + (store.lanes.findIndex(l => l.rank === rank) + 0.5) * this.scene.pitch }),
    };
  }

  /** The store has changed. */
  data(): void {
    this.view.data(Math.min(this.store.begin, this.store.end), this.view.following ? Math.max(this.shownEnd, this.view.to) : this.store.end);
    this.schedule();
  }

  dispose(): void {
    for (const end of this.ends) end();
    this.scene.dispose();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.slow);
    this.frame = -1;
    this.root.remove();
  }

  private listen(): void {
    const { scene, view } = this;
    this.ends.push(
      listen(scene, {
        zoom: (factor, x) => this.act(() => view.zoom(factor, x === undefined ? undefined : scene.time(x))),
        pan: pixels => this.act(() => view.pan((pixels / scene.plotWidth) * view.length)),
        hover: (x, y) => this.hover(x, y),
        leave: () => this.hover(-1, -1),
        click: (x, y) => this.click(x, y),
        range: (from, to, done) => this.chooseRange(from, to, done),
        key: (key, shift) => this.key(key, shift),
      }),
    );
    this.ends.push(
      watchTheme(this.root, palette => {
        this.palette = palette;
        this.legendKey = '';
        this.schedule();
      }),
    );
    // JupyterLab's keys for cells must not act on the notebook while the timeline has the focus; Ctrl-S and the like must.
    const guard = (event: KeyboardEvent) => this.root.toggleAttribute('data-lm-suppress-shortcuts', !event.ctrlKey && !event.metaKey);
    for (const name of ['keydown', 'keyup'] as const) this.root.addEventListener(name, guard, true);
    this.root.toggleAttribute('data-lm-suppress-shortcuts', true);
    const resized = new ResizeObserver(() => this.schedule());
    resized.observe(this.root);
    const seen = new IntersectionObserver(entries => {
      this.visible = entries[entries.length - 1].isIntersecting;
      if (this.visible) this.schedule();
    });
    seen.observe(this.root);
    this.ends.push(() => resized.disconnect(), () => seen.disconnect());
    this.search.addEventListener('input', () => this.searched());
    this.search.addEventListener('keydown', event => {
      event.stopPropagation();
      if (event.key === 'Enter') this.next(event.shiftKey);
      if (event.key === 'Escape') {
        this.search.value = '';
        this.searched();
        scene.canvas.focus();
      }
    });
  }

  private act(change: () => void): void {
    const followed = this.view.following;
    change();
    if (followed && this.view.following) this.shownEnd = this.view.to;
    this.schedule();
  }

  private setFollowing(on: boolean): void {
    this.act(() => this.view.follow(on));
  }

  // -- what is seen ---------------------------------------------------------------------------------------------------

  schedule(): void {
    if (this.frame === 0) this.frame = requestAnimationFrame(() => this.paint());
  }

  private paint(): void {
    this.frame = 0;
    if (!this.visible || !this.root.isConnected) return;
    const begun = this.timings.on ? performance.now() : 0;
    const width = this.root.clientWidth;
    if (width < 40) return;
    this.advance();
    this.scene.resize(width, this.height);
    this.scene.draw(this.palette, this.overlay);
    if (this.timings.on) this.timings.draw.push(performance.now() - begun);
    if (!this.slow) this.slow = window.setTimeout(() => this.texts(), this.drawnVersion < 0 ? 0 : 300);
  }

  /** While following, glides to what came last. */
  private advance(): void {
    const { view, store } = this;
    if (!view.following || !store.count) return;
    const target = store.end;
    const pixel = view.length / this.scene.plotWidth;
    const gap = target - this.shownEnd;
    const near = !(gap > pixel * 0.5) || gap > view.span || this.still.matches;
    this.shownEnd = near ? target : this.shownEnd + gap * SMOOTH;
    view.data(store.begin, this.shownEnd);
    if (!near) this.schedule();
  }

  /** What need not change with every frame. */
  private texts(): void {
    this.slow = 0;
    const { store, view } = this;
    const changed = this.drawnVersion !== store.version;
    this.drawnVersion = store.version;
    this.follow.textContent = view.following ? '❚❚' : '▶';
    this.follow.title = view.following ? 'Stand still (Space)' : 'Follow what happens (Space)';
    this.follow.setAttribute('aria-label', this.follow.title);
    this.state.textContent = view.following ? 'live' : 'paused';
    this.state.dataset.live = String(view.following);
    if (changed) this.statusText();
    this.drawLegend();
    this.panel();
  }

  private statusText(): void {
    const { store } = this;
    const gone = store.forgotten + store.lostBefore;
    const parts = [ranksText(store.lanes.map(lane => lane.rank)), `${count(store.count)} spans`];
    if (!store.count) parts.splice(0, 2, 'waiting for the first collective');
    if (gone) parts.push(`${count(gone)} oldest dropped`);
    const error = Math.max(0, ...store.clockError.values());
    if (error) parts.push(`clocks ± ${duration(error)}`);
    this.status.textContent = parts.join(' · ');
  }

  private drawLegend(): void {
    const kinds = new Set<number>();
    for (const lane of this.store.lanes) for (let i = Math.max(0, lane.work.n - 200); i < lane.work.n; i++) kinds.add(lane.work.kind[i] & 127);
    const key = `${[...kinds].sort().join()} ${this.palette.dark}`;
    if (key === this.legendKey) return;
    this.legendKey = key;
    const { palette } = this;
    const entry = (style: string, text: string) => h('span', {}, h('i', { class: 'hvd-swatch', style }), ` ${text}`);
    this.legend.replaceChildren(
      ...[...kinds].sort().map(kind => entry(`background:${css(palette.kinds[kind])}`, KINDS[kind])),
      entry(`background:${css(palette.wait)}`, 'arrived, waits for others'),
      entry(`background:${css(palette.late, 0.4)};border-top:3px solid ${css(palette.late)}`, 'others wait for this rank (▼ it comes)'),
    );
  }

  private panel(): void {
    const { overlay, store, view } = this;
    if (!store.count) return;
    if (overlay.selected && indexOf(overlay.selected) >= 0) {
      this.details.replaceChildren(...operationPanel(store, overlay.selected, this.palette));
      return;
    }
    const [from, to] = overlay.range ?? [view.from, view.to];
    const rows = overlay.range ? 0 : store.lanes.reduce((sum, lane) => sum + (lane.n ? (lane.n * Math.min(1, view.length / Math.max(1, store.end - store.begin))) : 0), 0);
    if (rows > LIVE_ROWS) {
      this.details.replaceChildren(h('span', { class: 'hvd-faint' }, `${count(Math.round(rows))} spans in view: Shift-drag over a stretch for its statistics`));
      return;
    }
    this.details.replaceChildren(...statisticsPanel(statistics(store, from, to, overlay.found?.names), this.palette, overlay.range ? 'Selection' : 'In view'));
  }

  // -- pointer and keys -----------------------------------------------------------------------------------------------

  private hitAt(x: number, y: number): Hit | null {
    const lane = x >= this.scene.gutter ? this.scene.laneAt(y) : null;
    return lane && y >= this.scene.top ? hitTest(this.store, lane, this.scene.time(x), (this.view.length / this.scene.plotWidth) * 4) : null;
  }

  private hover(x: number, y: number): void {
    const hit = this.hitAt(x, y);
    const before = this.overlay.hover;
    if (!hit && !before) return;
    this.overlay.hover = hit;
    if (hit && (hit.row !== before?.row || hit.lane !== before?.lane || hit.part !== before?.part)) this.tip.replaceChildren(...tooltip(this.store, hit));
    this.tip.hidden = !hit;
    if (hit) {
      const right = x + 16 + this.tip.offsetWidth > this.scene.width;
      this.tip.style.transform = `translate(${Math.round(right ? x - this.tip.offsetWidth - 12 : x + 14)}px, ${Math.round(y + 14)}px)`;
    }
    this.schedule();
  }

  private click(x: number, y: number): void {
    this.scene.canvas.focus({ preventScroll: true });
    this.overlay.range = null;
    this.select(this.hitAt(x, y));
  }

  /** Chooses what is shown below and framed. */
  select(hit: Hit | null): void {
    this.overlay.selected = hit;
    if (hit) {
      this.overlay.lane = this.store.lanes.indexOf(hit.lane);
      this.spoken.textContent = sentence(this.store, hit);
      this.panel();
    }
    this.schedule();
  }

  private chooseRange(from: number, to: number, done: boolean): void {
    const a = this.scene.time(Math.max(this.scene.gutter, Math.min(from, to)));
    const b = this.scene.time(Math.max(from, to));
    this.view.following = false;
    this.overlay.selected = null;
    this.overlay.range = [a, b];
    if (done) this.panel();
    this.schedule();
  }

  private searched(): void {
    this.overlay.found = search(this.store, this.search.value);
    const names = this.overlay.found?.names;
    this.found.textContent = names ? (names.size === 1 ? '1 name' : `${count(names.size)} names`) : '';
    this.schedule();
  }

  /** Goes to the next span whose name was searched for. */
  private next(back: boolean): void {
    const { selected } = this.overlay;
    const names = this.overlay.found?.names;
    if (!names?.size) return;
    const from = selected ? selected.lane.arrival[indexOf(selected)] + selected.lane.finished[indexOf(selected)] : this.view.from;
    const found = findNext(this.store, names, from, back) ?? findNext(this.store, names, back ? Infinity : -Infinity, back);
    if (found) this.reveal(found[0], found[1]);
  }

  private reveal(rank: number, k: number): void {
    const lane = this.store.lane(rank);
    const from = lane.arrival[k];
    const to = from + lane.finished[k];
    if (from < this.view.from || to > this.view.to || to - from < this.view.length / 400) {
      const length = Math.min(this.view.length, Math.max((to - from) * 8, 1000));
      this.view.show((from + to) / 2 - length / 2, (from + to) / 2 + length / 2);
    }
    this.overlay.range = null;
    this.select({ lane, row: lane.dropped + k, rows: 1, part: 'work' });
  }

  private key(key: string, shift: boolean): boolean {
    const { view } = this;
    const far = shift ? 0.5 : 0.12;
    const keys: Record<string, () => void> = {
      w: () => view.zoom(1 / 1.25),
      s: () => view.zoom(1.25),
      a: () => view.pan(-view.length * far),
      d: () => view.pan(view.length * far),
      f: () => view.fit(),
      ' ': () => view.follow(!view.following),
      '/': () => this.search.focus(),
      enter: () => this.next(shift),
      escape: () => this.forget(),
      arrowup: () => this.stepLane(-1),
      arrowdown: () => this.stepLane(1),
      '[': () => this.step(-1),
      ']': () => this.step(1),
      '?': () => (this.help.hidden = !this.help.hidden),
    };
    const same: Record<string, string> = { '+': 'w', '=': 'w', '-': 's', _: 's', arrowleft: 'a', arrowright: 'd' };
    const act = keys[same[key.toLowerCase()] ?? key.toLowerCase()];
    if (!act) return false;
    this.act(act);
    return true;
  }

  private forget(): void {
    this.overlay.selected = this.overlay.range = null;
    this.help.hidden = true;
    this.panel();
  }

  private stepLane(by: number): void {
    const { lanes } = this.store;
    this.overlay.lane = Math.max(0, Math.min(lanes.length - 1, this.overlay.lane + by));
    const lane = lanes[this.overlay.lane];
    if (lane) this.spoken.textContent = `rank ${lane.rank}: last ${count(lane.timesLast)} times, held the others up for ${duration(lane.heldUp)}`;
  }

  private step(by: number): void {
    const lane = this.store.lanes[Math.max(0, this.overlay.lane)];
    if (!lane?.work.n) return;
    const chosen = this.overlay.selected;
    const k = chosen?.lane === lane ? indexOf(chosen) : -1;
    const time = k >= 0 ? lane.arrival[k] + (lane.flags[k] & NOT_STARTED ? 0 : lane.started[k]) : this.view.to;
    let i = lane.work.at(time, Infinity);
    if (k >= 0) i += by;
    if (i >= 0 && i < lane.work.n) this.reveal(lane.rank, lane.work.row[i] - lane.dropped);
  }
}
