import { Notification } from '@jupyterlab/apputils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { Message } from '@lumino/messaging';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import type { Store } from '../../ui/src/model/store.ts';
import { Viewport } from '../../ui/src/model/viewport.ts';
import { Charts } from '../../ui/src/view/charts.ts';
import { h } from '../../ui/src/view/dom.ts';
import { MembershipView, type Wish } from '../../ui/src/view/membership.ts';
import { RanksView } from '../../ui/src/view/ranks.ts';
import { Timeline } from '../../ui/src/view/timeline.ts';
import type { Channel, KernelFeed, KernelFeeds } from './feed.ts';
import { OWN } from './kernel_channel.ts';

const CHANGE_WITHIN = 600_000; // ms; ranks of a cluster may take that long to start

/** Settings of the user; live. */
export interface Options {
  follow: boolean;
  ranks: boolean;
  membership: boolean;
}

export interface LabServices {
  feeds: KernelFeeds;
  notebooks: INotebookTracker;
  options: Options;
  trans: TranslationBundle;
  /** Shows where a collective was asked for. */
  open(notebook: NotebookPanel, site: string): Promise<void>;
  save(notebook: NotebookPanel, feed: KernelFeed, pool: string): Promise<void>;
}

/** Which notebook is shown, and which of its pools: by default the one that is in front, and its own. */
export interface Choice {
  /** Path of a notebook; empty: whichever is in front. */
  notebook: string;
  pool: string;
}

/** The timeline of a notebook's ranks. */
export class TimelinePanel extends Widget {
  /** What is shown has changed. */
  readonly changed = new Signal<TimelinePanel, void>(this);
  private readonly host: LabServices;
  private chosen: Choice = { notebook: '', pool: OWN };
  private notebook: NotebookPanel | null = null;
  private feed: KernelFeed | null = null;
  private channel: Channel | null = null;
  private timeline: Timeline | null = null;
  private table: RanksView | null = null;
  private membership: MembershipView | null = null;
  private readonly empty = h('div', { class: 'jp-HvdlabPanel-empty' });
  private readonly place = h('div', { class: 'jp-HvdlabPanel-timeline' });
  private readonly below = h('div', { class: 'jp-HvdlabPanel-ranks' });
  private readonly changes = h('div', { class: 'jp-HvdlabPanel-ranks' });
  private readonly spoken = h('div', { class: 'jp-HvdlabPanel-spoken', role: 'status', 'aria-live': 'polite' });
  /** What is in view, of each recording. */
  private readonly views = new WeakMap<Store, Viewport>();
  private emptyText = '';
  private heard = new Map<number, string>();
  private wasAway = false;

  constructor(host: LabServices) {
    super();
    this.host = host;
    this.addClass('jp-HvdlabPanel');
    this.node.append(this.place, this.below, this.changes, this.empty, this.spoken);
    host.notebooks.currentChanged.connect(this.look, this);
    host.notebooks.widgetAdded.connect(this.look, this);
    this.look();
  }

  dispose(): void {
    if (this.isDisposed) return;
    this.feed?.want(this, null);
    this.feed?.changed.disconnect(this.update_, this);
    this.drop();
    super.dispose();
  }

  get choice(): Choice {
    return this.chosen;
  }

  /** Shows another notebook's ranks, or another pool. */
  choose(choice: Choice): void {
    this.chosen = choice;
    this.look();
  }

  /** The notebook whose ranks are shown, how its kernel is reached, and what came. */
  get shown(): { notebook: NotebookPanel; feed: KernelFeed; channel: Channel } | null {
    const { notebook, feed, channel } = this;
    return notebook && feed && channel ? { notebook, feed, channel } : null;
  }

  get view(): Timeline | null {
    return this.timeline;
  }

  /** Apply the settings again. */
  refresh(): void {
    this.ranks();
    this.changeable();
  }

  protected onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this.look();
    this.timeline?.data();
  }

  protected onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this.look();
  }

  protected onAfterHide(message: Message): void {
    super.onAfterHide(message);
    if (this.channel) this.feed?.want(this, { pool: this.channel.pool, rows: false });
  }

  protected onActivateRequest(): void {
    this.focus();
  }

  private focus(): void {
    const target = this.place.querySelector<HTMLElement>('.hvd-plot canvas') ?? this.empty;
    target.focus({ preventScroll: true });
  }

  // -- what is shown --------------------------------------------------------------------------------------------------

  /** Finds the notebook that is meant. */
  private look(): void {
    if (this.isDisposed) return;
    const { notebooks, feeds } = this.host;
    const named = this.chosen.notebook ? notebooks.find(one => one.context.path === this.chosen.notebook) : undefined;
    const meant = named ?? (this.chosen.notebook ? this.notebook : notebooks.currentWidget);
    const notebook = meant && !meant.isDisposed ? meant : null;
    if (notebook !== this.notebook) {
      this.notebook = notebook;
      notebook?.disposed.connect(this.look, this);
      this.feed?.want(this, null);
      this.feed?.changed.disconnect(this.update_, this);
      this.feed = this.notebook && feeds.of(this.notebook.sessionContext);
      this.feed?.changed.connect(this.update_, this);
    }
    const channel = this.feed?.channel(this.chosen.pool) ?? null;
    if (channel !== this.channel) {
      this.channel = channel;
      this.heard.clear();
    }
    if (channel) this.feed!.want(this, { pool: channel.pool, rows: this.isVisible });
    this.show_();
  }

  private update_(_: KernelFeed, channel: Channel | null): void {
    if (channel && channel !== this.channel) return;
    this.show_();
  }

  private show_(): void {
    const { channel, feed } = this;
    const store = channel?.store;
    const known = !!store && (store.count > 0 || store.ranks.length > 0 || store.series.all.length > 0);
    if (this.timeline && this.timeline.store !== store) this.drop();
    if (known && !this.timeline) this.make(store);
    const focused = this.empty.contains(document.activeElement);
    this.place.hidden = !known;
    this.empty.hidden = known;
    if (known && focused) this.focus();
    if (known) {
      if (this.isVisible) this.timeline?.data();
      this.timeline!.stand(channel!.liveness);
      this.ranks();
      this.changeable();
      this.announce();
    } else this.explain(!!feed?.here);
    this.changed.emit();
  }

  private make(store: Store): void {
    const { host } = this;
    const shown = () => this.shown!;
    let view = this.views.get(store);
    if (!view) {
      this.views.set(store, (view = new Viewport()));
      view.following = host.options.follow;
    }
    const actions = {
      open: (site: string) => this.tell(host.open(shown().notebook, site)),
      save: () => this.tell(host.save(shown().notebook, shown().feed, shown().channel.pool)),
    };
    const charts = (place: HTMLElement) => new Charts(place, store, view);
    const isNew = view.to === new Viewport().to;
    this.timeline = new Timeline(this.place, store, { view, fill: true, actions, charts });
    if (isNew && !view.following && store.count) view.show(store.begin, store.end);
    // The page's own way to ask what is shown.
    (this.timeline.root as HTMLElement & { hvdlab?: unknown }).hvdlab = this.timeline.api;
  }

  private drop(): void {
    this.timeline?.dispose();
    this.timeline = null;
    this.table?.dispose();
    this.table = null;
    this.membership?.dispose();
    this.membership = null;
  }

  private ranks(): void {
    const store = this.channel?.store;
    const wanted = this.host.options.ranks && !!store?.ranks.length;
    this.below.hidden = !wanted;
    if (!wanted) return;
    this.table ??= new RanksView(this.below);
    this.table.update(store!.ranks, store!.heading);
    this.table.stand(this.channel!.liveness);
  }

  /** Which ranks there are, with buttons; not of pools that are only watched. */
  private changeable(): void {
    const membership = this.channel?.store.membership;
    const wanted = this.host.options.membership && !!membership;
    this.changes.hidden = !wanted;
    if (!wanted) return;
    this.membership ??= new MembershipView(this.changes, wish => this.change(wish));
    this.membership.update(membership);
    this.membership.stand(this.channel!.liveness);
  }

  private async change(wish: Wish): Promise<string> {
    const { feed, channel } = this.shown!;
    return String((await feed.ask({ type: 'change', pool: channel.pool, ...wish }, CHANGE_WITHIN)).text);
  }

  /** Announce to screen readers the ranks that joined and were lost. */
  private announce(): void {
    const { trans } = this.host;
    const now = new Map(this.channel!.store.ranks.map(row => [row.rank, row.state === 'lost' || row.state === 'left' ? row.state : 'here']));
    const said: string[] = [];
    for (const [rank, state] of now) {
      const before = this.heard.get(rank);
      if (before === state || !this.heard.size) continue;
      said.push(state === 'here' ? trans.__('rank %1 is there', rank) : state === 'lost' ? trans.__('rank %1 is lost', rank) : trans.__('rank %1 left', rank));
    }
    this.heard = now;
    const away = !!this.feed?.away;
    if (away !== this.wasAway) said.push(away ? trans.__('connection lost') : trans.__('connected again'));
    this.wasAway = away;
    if (said.length) this.spoken.textContent = said.join(', ');
  }

  /** Says why there is nothing, and what to do. */
  private explain(here: boolean): void {
    const { trans } = this.host;
    const { notebook, channel } = this;
    const [heading, text, code] = channel?.problem
      ? [trans.__('This pool can not be shown'), channel.problem, '']
      : !notebook
        ? [trans.__('No notebook is open'), trans.__('Open one: its ranks are shown here.'), '']
        : !here
          ? [trans.__('%1 has no ranks yet', title(notebook)), trans.__('Load the extension and start some in a cell:'), '%load_ext hvdlab\n%hvd_pool start -np 4']
          : [trans.__('%1 has no ranks yet', title(notebook)), trans.__('Start some in a cell; all that they do is shown here:'), '%hvd_pool start -np 4'];
    const key = [heading, text, code].join('\0');
    if (key === this.emptyText) return;
    this.emptyText = key;
    this.empty.replaceChildren(h('div', { class: 'jp-HvdlabPanel-emptyTitle' }, heading), h('div', {}, text), ...(code ? [h('pre', {}, code)] : []));
    this.empty.tabIndex = -1;
  }

  /** Lets the user know if this fails. */
  tell(done: Promise<void>): void {
    done.catch((error: unknown) => Notification.error(error instanceof Error ? error.message : String(error), { autoClose: 8000 }));
  }
}

function title(notebook: NotebookPanel): string {
  return notebook.title.label || notebook.context.path;
}
