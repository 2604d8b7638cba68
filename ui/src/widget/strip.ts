import { Liveness } from '../model/liveness.ts';
import type { Model } from '../model/stream.ts';
import { StripView, type StripState } from '../view/strip.ts';
import { watchKernel } from './kernel.ts';
import { hideStill } from './still.ts';

/**
 * Shows an output below all others of its cell, wherever it is among them; returns what undoes that.
 *
 * Otherwise text that is printed after the strip was made would stand below it. Only the look changes: the notebook keeps the order.
 */
function keepLast(element: HTMLElement): () => void {
  let undo = () => undefined as void;
  const frame = requestAnimationFrame(() => {
    const output = element.closest<HTMLElement>('.jp-OutputArea-child');
    const area = output?.parentElement;
    if (!output || !area?.classList.contains('jp-OutputArea')) return;
    const before = [area.style.display, area.style.flexDirection];
    [area.style.display, area.style.flexDirection] = ['flex', 'column'];
    output.style.order = '1';
    undo = () => {
      output.style.order = '';
      [area.style.display, area.style.flexDirection] = before;
    };
  });
  return () => {
    cancelAnimationFrame(frame);
    undo();
  };
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const view = new StripView(el, () => model.send({ type: 'open' }));
  const state = () => model.get('pace') as StripState;
  const liveness: Liveness = new Liveness(() => view.stand(liveness.standing), () => model.send({ type: 'hello' }));
  const update = () => {
    view.update(state());
    liveness.heard(!state().ended);
  };
  const opened = () => view.opened();
  model.on('change:pace', update);
  model.on('change:opened', opened);
  view.update(state(), false);
  liveness.wait(!state().ended);
  const forget = watchKernel(model.widget_manager, state().still, link => liveness.connected(link));
  const letGo = keepLast(el);
  const showStill = hideStill(el, state().still);
  return () => {
    letGo();
    forget();
    showStill();
    liveness.dispose();
    model.off('change:pace', update);
    model.off('change:opened', opened);
    view.dispose();
  };
}

export default { render };
