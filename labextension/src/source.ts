import type { TranslationBundle } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';
import { h } from '../../ui/src/view/dom.ts';
import { headingOf } from './heading.ts';
import type { Host, TimelinePanel } from './panel.ts';
import { OWN, type Pool } from './protocol.ts';

const NOTEBOOK = 'notebook:';
const POOL = 'pool:';

/** Chooses whose ranks are shown: those of the notebook in front, of another one, or a pool that is kept. */
export class SourceSelect extends Widget {
  private readonly select = h('select') as HTMLSelectElement;
  private readonly panel: TimelinePanel;
  private readonly host: Host;
  private readonly trans: TranslationBundle;
  private pools: Pool[] = [];
  private key = '';

  constructor(panel: TimelinePanel, host: Host) {
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

/** What the ranks do, in a line. */
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
