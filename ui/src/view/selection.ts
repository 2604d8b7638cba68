import { duration, ranks as ranksText, count } from '../draw/format.ts';
import type { Palette } from '../draw/palette.ts';
import { search, findNext, statistics } from '../model/statistics.ts';
import { NOT_STARTED, type Store } from '../model/store.ts';
import type { Group, Viewport } from '../model/viewport.ts';
import { t } from '../texts.ts';
import { sentence, operationPanel, statisticsPanel } from './details.ts';
import { button, h } from './dom.ts';
import type { Actions } from './options.ts';
import { hitTest, indexOf, type Hit, type Overlay, type Scene } from './scene.ts';

/** Selection and pointer of a timeline, with the steps from one to the next. */
export class Selection {
  readonly overlay: Overlay = { hover: null, selected: null, range: null, found: null, focus: null };
  private readonly scene: Scene;
  private readonly store: Store;
  private readonly say: (text: string) => void;

  /** `say` is called with the text for screen readers. */
  constructor(scene: Scene, say: (text: string) => void) {
    this.scene = scene;
    this.store = scene.store;
    this.say = say;
  }

  hitAt(x: number, y: number): Hit | null {
    const { scene } = this;
    const lane = x >= scene.gutter ? scene.laneAt(y) : null;
    return lane ? hitTest(this.store, lane, scene.time(x), scene.pixel * 4) : null;
  }

  /** Chooses what is at a point: a host, a cell's time, a lane or a collective. */
  at(x: number, y: number): void {
    const { scene, overlay } = this;
    const heading = scene.headingAt(y);
    if (heading) {
      scene.groups.toggle(heading.group);
      overlay.focus = heading.group;
      return;
    }
    const cell = scene.cellAt(x, y);
    if (cell) {
      this.between(cell.begin, cell.end ?? this.scene.now + 1); // what ends just now counts, too
      this.say(t('cell %1 on %2, %3', cell.text, ranksText(cell.ranks), duration((cell.end ?? this.scene.now) - cell.begin)));
      return;
    }
    overlay.range = null;
    overlay.focus = scene.laneAt(y) ?? overlay.focus;
    this.select(this.hitAt(x, y));
  }

  select(hit: Hit | null): void {
    this.overlay.selected = hit;
    if (!hit) return;
    this.overlay.focus = hit.lane;
    this.say(sentence(this.store, hit));
  }

  /** Chooses a stretch of time. */
  between(from: number, to: number): void {
    this.overlay.selected = null;
    this.overlay.range = [from, to];
  }

  forget(): void {
    const { overlay } = this;
    overlay.selected = overlay.range = null;
  }

  /** The stretch of time that is chosen. */
  get stretch(): [number, number] | null {
    const { selected, range } = this.overlay;
    if (range) return range;
    if (!selected) return null;
    const k = indexOf(selected);
    if (k < 0) return null;
    const { lane } = selected;
    const came = this.store.operations.get(lane.op[k]);
    return [Math.min(lane.arrival[k], came?.first ?? Infinity), lane.arrival[k] + lane.finished[k]];
  }

  zoom(): void {
    const stretch = this.stretch;
    if (!stretch) return;
    const margin = (stretch[1] - stretch[0]) * 0.08;
    this.scene.view.show(stretch[0] - margin, stretch[1] + margin);
  }

  /** The line of code of what is chosen. */
  get site(): string {
    const { selected } = this.overlay;
    const k = selected ? indexOf(selected) : -1;
    return selected && k >= 0 ? (this.store.sites[selected.lane.name[k]] ?? '') : '';
  }

  /** Looks for names; returns how many there are, or -1 if nothing is looked for. */
  search(text: string): number {
    const found = (this.overlay.found = search(this.store, text));
    return found ? new Set([...found.names].map(name => this.store.names[name])).size : -1;
  }

  /** Goes to the next span whose name was searched for. */
  next(back: boolean): void {
    const { selected } = this.overlay;
    const names = this.overlay.found?.names;
    if (!names?.size) return;
    const k = selected ? indexOf(selected) : -1;
    const from = selected && k >= 0 ? selected.lane.arrival[k] + selected.lane.finished[k] : this.scene.view.from;
    const found = findNext(this.store, names, from, back) ?? findNext(this.store, names, back ? Infinity : -Infinity, back);
    if (found) this.reveal(found[0], found[1]);
  }

  private reveal(rank: number, k: number): void {
    const { view, groups } = this.scene;
    const lane = this.store.lane(rank);
    const group = groups.of(lane);
    if (group?.collapsed) groups.toggle(group);
    const from = lane.arrival[k];
    const to = from + lane.finished[k];
    if (from < view.from || to > view.to || to - from < view.length / 400) {
      const length = Math.min(view.length, Math.max((to - from) * 8, 1000));
      view.show((from + to) / 2 - length / 2, (from + to) / 2 + length / 2);
    }
    this.overlay.range = null;
    this.select({ lane, row: lane.dropped + k, rows: 1, part: 'work' });
  }

  /** To the lane or host above or below. */
  stepRow(by: number): void {
    const { groups } = this.scene;
    const rows = groups.all.flatMap(group => [...(groups.several ? [group] : []), ...(groups.several && group.collapsed ? [] : group.lanes)]);
    if (!rows.length) return;
    const at = rows.findIndex(row => row === this.overlay.focus);
    const row = rows[Math.max(0, Math.min(rows.length - 1, at + by))];
    this.overlay.focus = row;
    if ('host' in row) this.say(hostText(row));
    else this.say(t('rank %1: others waited %2 for it', row.rank, duration(row.late.covered(...(this.overlay.range ?? this.scene.view.seen)))));
  }

  /** Collapses or opens the host where the keys are, or all. */
  toggle(all: boolean): void {
    const { groups } = this.scene;
    const { focus } = this.overlay;
    if (!groups.several) return;
    if (all) groups.toggleAll();
    const group = all ? null : focus && ('host' in focus ? focus : groups.of(focus));
    if (!group) return;
    groups.toggle(group);
    this.overlay.focus = group;
    this.say(hostText(group));
  }

  /** To the previous or next collective of the lane where the keys are. */
  step(by: number): void {
    const { focus } = this.overlay;
    const lane = (focus && ('host' in focus ? focus.lanes[0] : focus)) ?? this.store.lanes[0];
    if (!lane?.work.n) return;
    const chosen = this.overlay.selected;
    const k = chosen?.lane === lane ? indexOf(chosen) : -1;
    const time = k >= 0 ? lane.arrival[k] + (lane.flags[k] & NOT_STARTED ? 0 : lane.started[k]) : this.scene.view.to;
    let i = lane.work.at(time, Infinity);
    if (k >= 0) i += by;
    if (i >= 0 && i < lane.work.n) this.reveal(lane.rank, lane.work.row[i] - lane.dropped);
  }
}

function hostText(group: Group): string {
  const name = group.host || t('not known');
  const ranks = ranksText(group.lanes.map(lane => lane.rank));
  return group.collapsed ? t('host %1, %2, collapsed', name, ranks) : t('host %1, %2, open', name, ranks);
}

const LIVE_ROWS = 40_000;
const PADDING = 12;

/** Panel below the lanes: details of the selection, or statistics of the view without one. */
export class Panel {
  readonly root = h('div', { class: 'hvd-details' });
  private readonly scene: Scene;
  private readonly selection: Selection;
  private readonly actions: Actions;
  private readonly act: (change: () => void) => void;

  constructor(scene: Scene, selection: Selection, actions: Actions, act: (change: () => void) => void) {
    this.scene = scene;
    this.selection = selection;
    this.actions = actions;
    this.act = act;
  }

  update(palette: Palette): void {
    // Keep the focus of the keyboard where it was.
    if (this.root.matches(':focus-within')) return;
    this.root.replaceChildren(...(this.scene.store.count ? this.nodes(palette) : []));
  }

  /** How high it would like to be. */
  get contentHeight(): number {
    const { root } = this;
    const bottom = [...root.children].reduce((most, child) => Math.max(most, (child as HTMLElement).offsetTop + (child as HTMLElement).offsetHeight), root.offsetTop);
    return bottom - root.offsetTop + root.scrollTop + PADDING;
  }

  private nodes(palette: Palette): Node[] {
    const { store, view } = this.scene;
    const { selected, range, found } = this.selection.overlay;
    if (selected && indexOf(selected) >= 0) return operationPanel(store, selected, palette, this.actions);
    const names = found?.names;
    if (range) {
      const zoom = this.button(t('Zoom (Z)'), t('Show only this'), () => this.selection.zoom());
      return statisticsPanel(statistics(store, ...range, names), palette, t('Selection'), this.actions, [zoom]);
    }
    const rows = store.lanes.reduce((sum, lane) => sum + (lane.n ? lane.n * Math.min(1, view.length / Math.max(1, store.end - store.begin)) : 0), 0);
    if (rows > LIVE_ROWS) return [h('span', { class: 'hvd-faint' }, t('%1 spans in view: Shift-drag over a stretch for its statistics', count(Math.round(rows))))];
    return statisticsPanel(statistics(store, ...view.seen, names), palette, t('In view'), this.actions);
  }

  private button(label: string, title: string, act: () => void): HTMLElement {
    const element = button(label, title, () => {
      element.blur();
      this.act(act);
    });
    element.className = 'hvd-link';
    return element;
  }
}

/** What pointer and keys ask for. Positions are pixels on the canvas. */
export interface Commands {
  zoom(factor: number, x?: number): void;
  pan(pixels: number): void;
  hover(x: number, y: number): void;
  leave(): void;
  click(x: number, y: number): void;
  range(from: number, to: number): void;
  key(key: string, shift: boolean): boolean;
}

const CLICK = 4; // pixels that a click may move

/** Listen on the canvas; return a function that ends it. */
export function listen(scene: Scene, commands: Commands): () => void {
  const { canvas } = scene;
  const end = new AbortController();
  const on = <K extends keyof HTMLElementEventMap>(name: K, act: (event: HTMLElementEventMap[K]) => void, passive = true) =>
    canvas.addEventListener(name, act, { signal: end.signal, passive });
  let drag: { id: number; x: number; y: number; last: number; choosing: boolean; moved: boolean } | null = null;

  on('pointerdown', event => {
    if (event.button !== 0) return;
    const choosing = event.shiftKey || event.offsetY < scene.top;
    drag = { id: event.pointerId, x: event.offsetX, y: event.offsetY, last: event.offsetX, choosing, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  on('pointermove', event => {
    const x = event.offsetX;
    if (!drag) {
      const over = scene.headingAt(event.offsetY) || scene.cellAt(x, event.offsetY);
      canvas.style.cursor = over ? 'pointer' : event.shiftKey || event.offsetY < scene.top ? 'col-resize' : 'default';
      commands.hover(x, event.offsetY);
      return;
    }
    if (Math.abs(x - drag.x) >= CLICK) drag.moved = true;
    if (!drag.moved) return;
    if (drag.choosing) commands.range(drag.x, x);
    else {
      canvas.style.cursor = 'grabbing';
      commands.pan(drag.last - x);
      drag.last = x;
    }
  });
  const release = (event: PointerEvent) => {
    if (!drag || drag.id !== event.pointerId) return;
    const done = drag;
    drag = null;
    canvas.style.cursor = 'default';
    if (done.moved && done.choosing) commands.range(done.x, event.offsetX);
    else if (!done.moved && event.type === 'pointerup') commands.click(done.x, done.y);
  };
  on('pointerup', release);
  on('pointercancel', release);
  on('pointerleave', () => commands.leave());
  on(
    'wheel',
    event => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      // A page that is scrolled must not get stuck here: the wheel zooms once the timeline was clicked, or with Ctrl.
      if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== canvas) {
        const root = canvas.getRootNode();
        if (!(root instanceof ShadowRoot) || root.activeElement !== canvas) return;
      }
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 16 : 1;
      if (sideways) commands.pan((event.deltaX || event.deltaY) * lines);
      else commands.zoom(Math.exp(event.deltaY * lines * 0.0018), event.offsetX);
    },
    false,
  );
  on(
    'keydown',
    event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (commands.key(event.key, event.shiftKey)) {
        event.preventDefault();
        event.stopPropagation();
      }
    },
    false,
  );
  return () => end.abort();
}

/** What keys ask for beyond the view and what is chosen. */
export interface KeyCommands {
  search(): void;
  help(): void;
  charts(): void;
  open(): void;
  forget(): void;
}

const SAME: Record<string, string> = { '+': 'w', '=': 'w', '-': 's', _: 's', arrowleft: 'a', arrowright: 'd' };

/** What a key does; `undefined` if it does nothing here. */
export function actionOf(key: string, shift: boolean, view: Viewport, selection: Selection, commands: KeyCommands): (() => void) | undefined {
  const far = shift ? 0.5 : 0.12;
  const keys: Record<string, () => void> = {
    w: () => view.zoom(1 / 1.25),
    s: () => view.zoom(1.25),
    a: () => view.pan(-view.length * far),
    d: () => view.pan(view.length * far),
    f: () => view.fit(),
    home: () => view.toBegin(),
    end: () => view.toEnd(),
    ' ': () => view.follow(!view.following),
    m: () => selection.between(...view.seen),
    z: () => selection.zoom(),
    x: () => selection.toggle(shift),
    o: () => commands.open(),
    g: () => commands.charts(),
    '/': () => commands.search(),
    enter: () => selection.next(shift),
    escape: () => commands.forget(),
    arrowup: () => selection.stepRow(-1),
    arrowdown: () => selection.stepRow(1),
    '[': () => selection.step(-1),
    ']': () => selection.step(1),
    '?': () => commands.help(),
  };
  const name = key.toLowerCase();
  return keys[SAME[name] ?? name];
}
