import type { IOutputModel } from '@jupyterlab/rendermime';
import { KernelMessage } from '@jupyterlab/services';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

/** Names of the pictures that views leave in a notebook: display areas and, in their HTML, CSS classes. */
const NAME = /^hvdlab-(timeline|ranks|membership|metrics)-[0-9a-f]+$/;

/**
 * Brings the pictures of views up to date also in pages that were opened after the views were shown.
 *
 * JupyterLab knows by the messages of this page which outputs a display area has, so that after a reload the updates of
 * areas find none: what is saved then would stay as it was.
 */
export function keepStills(notebooks: INotebookTracker): void {
  const watch = (panel: NotebookPanel) => {
    panel.sessionContext.iopubMessage.connect((_, message) => {
      if (!KernelMessage.isUpdateDisplayDataMsg(message)) return;
      const { data, metadata, transient } = message.content;
      const name = String(transient?.display_id ?? '');
      if (NAME.test(name)) replace(panel, name, data as ReadonlyPartialJSONObject, metadata as ReadonlyPartialJSONObject);
    });
  };
  notebooks.forEach(watch);
  notebooks.widgetAdded.connect((_, panel) => watch(panel));
}

/** Puts a picture in the place of the one of that name, where it is another. */
function replace(panel: NotebookPanel, name: string, data: ReadonlyPartialJSONObject, metadata: ReadonlyPartialJSONObject): void {
  const html = (output: IOutputModel) => String(output.data['text/html'] ?? '');
  for (const cell of panel.content.widgets) {
    if (!('outputArea' in cell)) continue;
    const outputs = (cell.outputArea as { model: { length: number; get(i: number): IOutputModel } }).model;
    for (let i = 0; i < outputs.length; i++) {
      const output = outputs.get(i);
      if (html(output).includes(name) && html(output) !== data['text/html']) output.setData({ data, metadata });
    }
  }
}
