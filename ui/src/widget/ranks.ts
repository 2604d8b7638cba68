import type { Failure } from '../model/failures.ts';
import { RanksView, type RankRow } from '../view/ranks.ts';
import { hideStill } from './still.ts';
import type { Model } from './stream.ts';

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const view = new RanksView(el);
  const update = () => view.update(model.get('rows') as RankRow[], model.get('heading') as string, model.get('failed') as Failure[]);
  model.on('change:rows', update);
  model.on('change:failed', update);
  update();
  const showStill = hideStill(el, String(model.get('still')));
  return () => {
    showStill();
    model.off('change:rows', update);
    model.off('change:failed', update);
    view.dispose();
  };
}

export default { render };
