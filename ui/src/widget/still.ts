const LEVELS = 12;

/**
 * Hides the still picture that a saved notebook keeps while the live one is shown; returns what shows it again.
 *
 * It is shown again also if the live one leaves the page without that: a kernel that ends while the page is busy closes its widgets'
 * comms, and JupyterLab may then take a view away whose removal has not been announced to it.
 */
export function hideStill(element: HTMLElement, name: string): () => void {
  const hidden = new Set<HTMLElement>();
  const hide = () => {
    let at: HTMLElement | null = element;
    for (let level = 0; at && level < LEVELS; level++, at = at.parentElement) {
      const found = at.querySelectorAll<HTMLElement>(`.${CSS.escape(name)}`);
      if (!found.length) continue;
      for (const still of found) {
        const output = still.closest<HTMLElement>('.jp-OutputArea-child') ?? still;
        if (output.contains(element)) continue;
        output.style.display = 'none';
        hidden.add(output);
      }
      return at;
    }
    return null;
  };
  const show = () => {
    for (const output of hidden) output.style.display = '';
    hidden.clear();
  };
  let area: HTMLElement | null = null;
  // The still is replaced now and then, and the view is put into the page after it was made. A notebook takes cells that are
  // scrolled away out of the page, with all that is in them: what counts is whether the two are together.
  const observer = new MutationObserver(changes => {
    if (!area?.contains(element)) show();
    else if (changes.some(change => !element.contains(change.target))) hide();
  });
  const frame = requestAnimationFrame(() => {
    area = hide();
    if (area) observer.observe(area, { childList: true, subtree: true });
  });
  return () => {
    cancelAnimationFrame(frame);
    observer.disconnect();
    show();
  };
}
