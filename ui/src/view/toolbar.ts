import { count, duration, ranks as ranksText } from '../draw/format.ts';
import { css, type Palette } from '../draw/palette.ts';
import { KINDS, type Store } from '../model/store.ts';
import { t } from '../texts.ts';
import { button, h, menu } from './dom.ts';
import { PERFETTO, type Actions } from './options.ts';

/** Commands of the toolbar. */
export interface ToolbarCommands {
  follow(): void;
  zoom(factor: number): void;
  fit(): void;
  help(): void;
  /** Shows or hides the charts; missing if there can't be any. */
  charts?: () => void;
  /** The text to search for has changed. */
  search(text: string): void;
  /** Goes to the next match, or the one before. */
  next(back: boolean): void;
  /** The search is left. */
  leave(): void;
}

const TOLD = 8000; // ms
let made = 0;

/** Title, state, search and buttons. */
export class Toolbar {
  readonly root: HTMLElement;
  readonly search = h('input', { type: 'search', placeholder: t('Search tensors'), 'aria-label': t('Search tensors by name'), spellcheck: 'false' }) as HTMLInputElement;
  /** Changes all the time: not a live region. */
  readonly status = h('span', { class: 'hvd-status', id: `hvd-status-${++made}` });
  private readonly state = h('span', { class: 'hvd-state', role: 'status' });
  private readonly found = h('span', { class: 'hvd-faint', 'aria-live': 'polite' });
  private readonly notice = h('span', { class: 'hvd-notice', role: 'status' });
  private readonly graph: HTMLButtonElement;
  private told = 0;
  private readonly follow: HTMLButtonElement;

  constructor(title: string, commands: ToolbarCommands, actions: Actions) {
    this.follow = button('', '', () => commands.follow());
    this.follow.className = 'hvd-follow';
    this.graph = button('∿', t('Charts under the lanes (G)'), () => commands.charts?.());
    this.charts(false);
    const { save } = actions;
    const items = save
      ? [
          { label: t('Save as Chrome trace (JSON)'), act: () => save() },
          { label: t('Perfetto, which opens it (ui.perfetto.dev)'), href: PERFETTO },
        ]
      : [];
    const buttons = h(
      'span',
      { class: 'hvd-buttons', role: 'group', 'aria-label': t('View') },
      this.follow,
      button('−', t('Zoom out (S)'), () => commands.zoom(1.6)),
      button('+', t('Zoom in (W)'), () => commands.zoom(1 / 1.6)),
      button('⤢', t('Show everything (F)'), () => commands.fit()),
      commands.charts && this.graph,
      menu('⤓', t('Save or open elsewhere'), items),
      button('?', t('Keys (?)'), () => commands.help()),
    );
    this.root = h('div', { class: 'hvd-bar' }, h('strong', {}, title), this.state, this.status, h('span', { class: 'hvd-space' }), this.notice, this.found, this.search, buttons);
    this.search.addEventListener('input', () => commands.search(this.search.value));
    this.search.addEventListener('keydown', event => {
      event.stopPropagation();
      if (event.key === 'Enter') commands.next(event.shiftKey);
      if (event.key !== 'Escape') return;
      this.search.value = '';
      commands.search('');
      commands.leave();
    });
  }

  tell(text: string): void {
    clearTimeout(this.told);
    this.notice.textContent = text;
    if (text) this.told = window.setTimeout(() => this.tell(''), TOLD);
  }

  dispose(): void {
    clearTimeout(this.told);
  }

  /** Whether charts are shown. */
  charts(on: boolean): void {
    this.graph.setAttribute('aria-pressed', String(on));
  }

  matches(text: string): void {
    this.found.textContent = text;
  }

  /** Whether the view follows; `past` says that nothing comes any more, and is empty while something may. */
  following(on: boolean, past: string): void {
    this.follow.textContent = on ? '❚❚' : '▶';
    this.follow.title = on ? t('Stand still (Space)') : t('Follow what happens (Space)');
    this.follow.setAttribute('aria-label', this.follow.title);
    const text = past || (on ? t('live') : t('paused'));
    if (this.state.textContent !== text) this.state.textContent = text;
    this.state.dataset.live = String(on && !past);
  }

  /** What is shown, what was dropped and how far the clocks may be off. */
  update(store: Store): void {
    const gone = store.forgotten + store.lostBefore;
    const parts: (Node | string)[] = store.count
      ? [ranksText(store.lanes.map(lane => lane.rank)), t('%1 spans', count(store.count))]
      : [store.heading, t('waiting for the first collective')].filter(Boolean);
    if (gone) parts.push(h('span', { title: t('A view keeps a bounded number of spans; those before are no longer here') }, t('%1 oldest dropped', count(gone))));
    const error = Math.max(0, ...store.clockError.values());
    const why = t('How far the clocks of the hosts may be apart. Who came last by less than that is not said.');
    if (error) parts.push(h('span', { title: why }, t('clocks ± %1', duration(error))));
    this.status.replaceChildren(...parts.flatMap((part, i) => (i ? [' · ', part] : [part])));
  }
}

const LOOKED_AT = 200;

/** What the colours mean: those of the kinds of collectives that came last, and what every timeline has. */
export class Legend {
  readonly root = h('div', { class: 'hvd-legend' });
  private key = '';

  update(store: Store, palette: Palette): void {
    const kinds = new Set<number>();
    for (const lane of store.lanes) for (let i = Math.max(0, lane.work.n - LOOKED_AT); i < lane.work.n; i++) kinds.add(lane.work.kind[i] & 127);
    const sorted = [...kinds].sort((a, b) => a - b);
    const key = `${sorted.join()} ${palette.dark}`;
    if (key === this.key) return;
    this.key = key;
    const entry = (style: string, text: string) => h('span', {}, h('i', { class: 'hvd-swatch', style }), ` ${text}`);
    this.root.replaceChildren(
      ...sorted.map(kind => entry(`background:${css(palette.kinds[kind])}`, t(KINDS[kind]))),
      entry(`background:${css(palette.wait)}`, t('arrived, waits for others')),
      entry(`background:${css(palette.late, 0.4)};border-top:3px solid ${css(palette.late)}`, t('others wait for this rank (▼ it comes)')),
    );
  }
}

const lines = () => [
  [t('W S, + −, wheel'), t('zoom')],
  [t('A D, ← →, drag'), t('move; with Shift, further')],
  [t('Home End'), t('the beginning, the end')],
  [t('F'), t('everything')],
  [t('Space'), t('follow what happens, or stand still')],
  [t('click'), t('one collective on all ranks')],
  [t('↑ ↓'), t('another rank or host')],
  [t('[ ]'), t('its previous and next collective')],
  [t('X, click on a host'), t('collapse or open a host; Shift: all')],
  [t('Shift + drag, M'), t('choose a stretch; choose what is in view')],
  [t('click on a cell'), t('choose the time in which it ran')],
  [t('Z'), t('zoom to what is chosen')],
  [t('O'), t('go to the line of code')],
  [t('G'), t('show or hide the charts')],
  [t('/, Enter'), t('search, next match; Shift: previous')],
  [t('Esc'), t('forget what is chosen')],
];

/** The keys, in a box that is hidden at first. */
export function helpBox(): HTMLElement {
  const list = h('dl', { class: 'hvd-help', hidden: '', role: 'note', 'aria-label': t('Keys') });
  for (const [keys, what] of lines()) list.append(h('dt', {}, keys), h('dd', {}, what));
  return list;
}
