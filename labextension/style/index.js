import '../lib/views.css';
import './base.css';
