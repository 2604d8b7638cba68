import { VDomModel, VDomRenderer } from '@jupyterlab/ui-components';
import { TextItem } from '@jupyterlab/statusbar';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';
import type { Channel, Feed, Feeds } from './feed.ts';
import { headingOf } from './heading.ts';
import { OWN } from './protocol.ts';

/** The ranks of the notebook in front, in a line. */
export class RanksModel extends VDomModel {
  text = '';
  lost = false;
  away = false;
  private feed: Feed | null = null;
  private readonly feeds: Feeds;
  private readonly notebooks: INotebookTracker;
  private readonly trans: TranslationBundle;
  private wanted = true;

  constructor(notebooks: INotebookTracker, feeds: Feeds, trans: TranslationBundle) {
    super();
    this.trans = trans;
    this.feeds = feeds;
    this.notebooks = notebooks;
    notebooks.currentChanged.connect(this.look, this);
    this.look();
  }

  /** Whether it is shown at all: what nobody sees, the kernel need not tell. */
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

  private update(_?: Feed, channel?: Channel | null): void {
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
