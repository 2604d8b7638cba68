import { count } from '../draw/format.ts';
import type { Palette } from '../draw/palette.ts';
import { statistics } from '../model/statistics.ts';
import { t } from '../texts.ts';
import type { Choice } from './choice.ts';
import { operationPanel, statisticsPanel } from './details.ts';
import { button, h } from './dom.ts';
import { indexOf } from './hits.ts';
import type { Actions } from './options.ts';
import type { Scene } from './scene.ts';

const LIVE_ROWS = 40_000;
const PADDING = 12;

/** What is said below the lanes about what is chosen, or else about what is in view. */
export class Panel {
  readonly root = h('div', { class: 'hvd-details' });
  private readonly scene: Scene;
  private readonly choice: Choice;
  private readonly actions: Actions;
  private readonly act: (change: () => void) => void;

  constructor(scene: Scene, choice: Choice, actions: Actions, act: (change: () => void) => void) {
    this.scene = scene;
    this.choice = choice;
    this.actions = actions;
    this.act = act;
  }

  update(palette: Palette): void {
    // Who has the keyboard here goes on with it.
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
    const { selected, range, found } = this.choice.overlay;
    if (selected && indexOf(selected) >= 0) return operationPanel(store, selected, palette, this.actions);
    const names = found?.names;
    if (range) {
      const zoom = this.button(t('Zoom (Z)'), t('Show only this'), () => this.choice.zoom());
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
