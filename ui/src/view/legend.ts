import { css, type Palette } from '../draw/palette.ts';
import { KINDS, type Store } from '../model/store.ts';
import { t } from '../texts.ts';
import { h } from './dom.ts';

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
