import { RanksView, type RankRow } from '../view/ranks.ts';
import { hideStill } from './still.ts';
import type { Model } from './stream.ts';

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const view = new RanksView(el);
  const update = () => view.update(model.get('rows') as RankRow[], model.get('heading') as string);
  model.on('change:rows', update);
  update();
  const showStill = hideStill(el, String(model.get('still')));
  return () => {
    showStill();
    model.off('change:rows', update);
    view.dispose();
  };
}

export default { render };
