import { KernelMessage, type Kernel } from '@jupyterlab/services';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';

/**
 * Remove the boxes of questions that ranks do not wait for any more.
 *
 * A rank may die, or leave its prompt, while its question is open. The protocol has no message that takes a question back, and
 * JupyterLab runs no cell as long as one is open. When the cell that asked has ended, no rank waits for an answer.
 */
export function removeEndedPrompts(notebooks: INotebookTracker): void {
  const watch = (panel: NotebookPanel) => {
    panel.sessionContext.iopubMessage.connect((context, message) => {
      if (!KernelMessage.isStatusMsg(message) || message.content.execution_state !== 'idle') return;
      const parent = message.parent_header as KernelMessage.IHeader;
      if (parent.msg_type !== 'execute_request' || parent.subshell_id) return;
      if (removeBoxes(panel, parent.msg_id)) context.session?.kernel?.removeInputGuard();
    });
  };
  notebooks.forEach(watch);
  notebooks.widgetAdded.connect((_, panel) => watch(panel));
}

/**
 * Remove the boxes in which ranks ask, below the cell that `request` ran. Returns whether there were any: those of other
 * programs are left to them. A cell that runs next may ask before the end of the one before is known here, since questions
 * come on a channel of their own; other programs have requests carried out as well, which belong to no cell.
 */
function removeBoxes(panel: NotebookPanel, request: string): boolean {
  let found = false;
  for (const cell of panel.content.widgets) {
    if (!('outputArea' in cell)) continue;
    const area = cell.outputArea as { widgets: ReadonlyArray<{ node: HTMLElement; dispose(): void }>; future?: Kernel.IShellFuture | null };
    if (area.future?.msg.header.msg_id !== request) continue;
    for (const item of [...area.widgets]) {
      if (!item.node.classList.contains('jp-OutputArea-stdin-item')) continue;
      const prompt = item.node.querySelector('.jp-Stdin-prompt')?.textContent ?? '';
      if (!prompt.startsWith('[rank ')) continue;
      item.dispose();
      found = true;
    }
  }
  return found;
}
