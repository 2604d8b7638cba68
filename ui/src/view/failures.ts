import type { Failure } from '../model/store.ts';
import { h } from './dom.ts';

/** What a view says in itself about failures; nothing while there are none. */
export class FailuresBox {
  readonly root = h('div', { class: 'hvd-failures', role: 'status', hidden: '' });
  private shown = '';

  update(failures: readonly Failure[]): void {
    const key = failures.map(one => one.text).join('\n');
    if (key === this.shown) return;
    this.shown = key;
    this.root.hidden = !failures.length;
    this.root.replaceChildren(...failures.map(one => h('details', {}, h('summary', {}, one.text), h('pre', {}, one.trace))));
  }
}
