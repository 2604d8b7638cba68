import { LabIcon } from '@jupyterlab/ui-components';
import svgstr from '../style/icon.svg';

/** Lanes, of which one is late. */
export const ranksIcon = new LabIcon({ name: 'hvdlab:ranks', svgstr });
