import { Liveness } from '../model/liveness.ts';
import type { Failure } from '../model/store.ts';
import type { Model } from '../model/stream.ts';
import { RanksView, type RankRow } from '../view/ranks.ts';
import { watchKernel } from './kernel.ts';
import { hideStill } from './still.ts';

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const view = new RanksView(el);
  const update = () => view.update(model.get('rows') as RankRow[], model.get('heading') as string, model.get('failed') as Failure[]);
  // The kernel then sends all that it shows, and a new still: a page that was loaded again or was away has old ones.
  const hello = () => model.send({ type: 'hello' });
  const liveness: Liveness = new Liveness(() => view.stand(liveness), hello);
  const runs = () => (model.get('rows') as RankRow[]).some(row => row.state === 'running');
  const news = () => {
    update();
    liveness.heard(runs());
  };
  const alive = () => liveness.heard(runs());
  for (const event of ['change:rows', 'change:heading', 'change:failed']) model.on(event, news);
  model.on('msg:custom', alive);
  update();
  liveness.wait(runs());
  const forget = watchKernel(model.widget_manager, String(model.get('still')), link => liveness.connected(link));
  hello();
  const showStill = hideStill(el, String(model.get('still')));
  return () => {
    showStill();
    forget();
    liveness.dispose();
    for (const event of ['change:rows', 'change:heading', 'change:failed']) model.off(event, news);
    model.off('msg:custom', alive);
    view.dispose();
  };
}

export default { render };
