import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import { VDomModel, VDomRenderer } from '@jupyterlab/ui-components';
import { TextItem } from '@jupyterlab/statusbar';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import * as React from 'react';
import { h } from '../../ui/src/view/dom.ts';
import type { Channel, KernelFeed, KernelFeeds } from './feed.ts';
import { OWN, type Pool } from './kernel_channel.ts';
import type { LabServices, TimelinePanel } from './panel.ts';

/** What the ranks do, in a line; of a kernel that can't be heard only what is likely to be so still. */
export function headingOf(feed: KernelFeed, { store, liveness }: Channel, trans: TranslationBundle): string {
  const { heading } = store;
  const [ranks] = heading.split(' · ');
  if (feed.away && heading) return trans.__('%1 · connection lost', ranks);
  return liveness.standing === 'silent' && heading ? trans.__('%1 · no news', ranks) : heading;
}

const NOTEBOOK = 'notebook:';
const POOL = 'pool:';

/** Chooses whose ranks are shown: those of the notebook in front, of another one, or a pool that is kept. */
export class PoolSelect extends Widget {
  private readonly select = h('select') as HTMLSelectElement;
  private readonly panel: TimelinePanel;
  private readonly host: LabServices;
  private readonly trans: TranslationBundle;
  private pools: Pool[] = [];
  private key = '';

  constructor(panel: TimelinePanel, host: LabServices) {
    super();
    this.panel = panel;
    this.host = host;
    this.trans = host.trans;
    this.addClass('jp-HvdlabPanel-source');
    const label = this.trans.__('Whose ranks are shown');
    this.select.title = label;
    this.select.setAttribute('aria-label', label);
    const arrow = h('div', { class: 'jp-HvdlabPanel-select' }, this.select);
    this.node.append(arrow);
    this.select.addEventListener('change', () => this.chosen());
    for (const event of ['pointerdown', 'focus']) this.select.addEventListener(event, () => void this.ask());
    panel.changed.connect(this.fill, this);
    host.notebooks.widgetAdded.connect(this.fill, this);
    this.fill();
  }

  /** Asks the kernel which pools there are. */
  async ask(): Promise<void> {
    const feed = this.panel.shown?.feed;
    if (!feed?.here) return;
    this.pools = await feed.pools().catch(() => this.pools);
    this.fill();
  }

  private chosen(): void {
    const { value } = this.select;
    const { choice } = this.panel;
    if (value.startsWith(POOL)) this.panel.choose({ notebook: choice.notebook, pool: value.slice(POOL.length) });
    else this.panel.choose({ notebook: value.slice(NOTEBOOK.length), pool: OWN });
  }

  private fill(): void {
    const { choice, shown } = this.panel;
    const front = this.host.notebooks.currentWidget;
    const options: [string, string][] = [[NOTEBOOK, front ? this.trans.__('Notebook in front (%1)', front.title.label) : this.trans.__('Notebook in front')]];
    this.host.notebooks.forEach(notebook => {
      const { path } = notebook.context;
      if (choice.notebook === path || this.host.feeds.of(notebook.sessionContext).here) options.push([NOTEBOOK + path, notebook.title.label || path]);
    });
    for (const pool of this.pools) {
      if (pool.kind === 'kept') options.push([POOL + pool.id, this.trans._n('Kept pool %2 (%1 rank)', 'Kept pool %2 (%1 ranks)', pool.size, pool.name)]);
      if (pool.kind === 'variable') options.push([POOL + pool.id, this.trans._n('%2 (%1 rank)', '%2 (%1 ranks)', pool.size, pool.name)]);
    }
    const value = choice.pool ? POOL + choice.pool : NOTEBOOK + choice.notebook;
    if (!options.some(([id]) => id === value)) options.push([value, choice.pool ? choice.pool.replace(/^\w+:/, '') : choice.notebook]);
    const key = JSON.stringify([options, value, shown?.channel.pool]);
    if (key === this.key) return;
    this.key = key;
    this.select.replaceChildren(...options.map(([id, text]) => h('option', { value: id }, text)));
    this.select.value = value;
  }
}

/** Text of the panel's heading: the state of the ranks in one line. */
export class HeadingText extends Widget {
  private readonly text = h('span');

  constructor(panel: TimelinePanel, trans: TranslationBundle) {
    super();
    this.addClass('jp-HvdlabPanel-heading');
    this.node.append(this.text);
    const fill = () => {
      const { shown } = panel;
      const text = shown ? headingOf(shown.feed, shown.channel, trans) : '';
      if (this.text.textContent !== text) this.text.textContent = text;
    };
    panel.changed.connect(fill);
    fill();
  }
}

/** The ranks of the notebook in front, in a line. */
export class RanksModel extends VDomModel {
  text = '';
  lost = false;
  away = false;
  private feed: KernelFeed | null = null;
  private readonly feeds: KernelFeeds;
  private readonly notebooks: INotebookTracker;
  private readonly trans: TranslationBundle;
  private wanted = true;

  constructor(notebooks: INotebookTracker, feeds: KernelFeeds, trans: TranslationBundle) {
    super();
    this.trans = trans;
    this.feeds = feeds;
    this.notebooks = notebooks;
    notebooks.currentChanged.connect(this.look, this);
    this.look();
  }

  /** Whether the item is shown: the kernel need not send data for a hidden one. */
  set shown(shown: boolean) {
    this.wanted = shown;
    this.look();
  }

  dispose(): void {
    this.feed?.want(this, null);
    super.dispose();
  }

  private look(): void {
    const front: NotebookPanel | null = this.notebooks.currentWidget;
    const feed = front && this.wanted ? this.feeds.of(front.sessionContext) : null;
    if (feed !== this.feed) {
      this.feed?.want(this, null);
      this.feed?.changed.disconnect(this.update, this);
      this.feed = feed;
      feed?.changed.connect(this.update, this);
      feed?.want(this, { pool: OWN, rows: false });
    }
    this.update();
  }

  private update(_?: KernelFeed, channel?: Channel | null): void {
    if (channel && channel.pool !== OWN) return;
    const own = this.feed?.here ? this.feed.channel(OWN) : null;
    const away = !!this.feed?.away;
    const text = own && !own.ended ? headingOf(this.feed!, own, this.trans) : '';
    const lost = !!own && own.store.ranks.some(row => row.state === 'lost');
    if (text === this.text && lost === this.lost && away === this.away) return;
    Object.assign(this, { text, lost, away });
    this.stateChanged.emit();
  }
}

export class RanksItem extends VDomRenderer<RanksModel> {
  private readonly trans: TranslationBundle;
  private readonly click: () => void;

  constructor(model: RanksModel, trans: TranslationBundle, click: () => void) {
    super(model);
    this.trans = trans;
    this.click = click;
    this.addClass('jp-mod-highlighted');
    this.addClass('jp-HvdlabStatus');
  }

  render(): React.ReactElement | null {
    const { text, lost, away } = this.model;
    if (!text) return null;
    const { trans } = this;
    const title = away
      ? trans.__('The kernel can not be reached now. Its ranks go on; what they do is shown as soon as it is there again.')
      : lost
        ? trans.__('Ranks were lost; show the timeline of the ranks')
        : trans.__('Show the timeline of the ranks');
    const act = (event: React.KeyboardEvent) => {
      if (event.key === 'Enter' || event.key === ' ') this.click();
    };
    return React.createElement(TextItem, {
      source: text,
      title,
      onClick: this.click,
      onKeyDown: act,
      role: 'button',
      tabIndex: 0,
      className: lost || away ? 'jp-HvdlabStatus-lost' : '',
    } as never);
  }
}
