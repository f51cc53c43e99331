package daemon

import (
	"fmt"

	"jbofd/internal/config"
)

// Reload reads the configuration again and changes what can change while the daemon runs. With dryRun it does all that
// can be refused, and changes nothing. source says in the log who asked.
//
// Errors: what is wrong with the configuration, needs a restart, or does not fit the drives; errStopping. Nothing has
// changed then.
func (n *Node) Reload(source string, dryRun bool) (config.Changes, error) {
	what := "a reload"
	if dryRun {
		what = "a dry run of a reload"
	}
	if err := n.beginChange(what + " (" + source + ")"); err != nil {
		return config.Changes{}, err
	}
	defer n.endChange()
	changes, err := n.reloadLocked(dryRun)
	if dryRun {
		return changes, err
	}
	n.tel.Reloaded(err == nil)
	if err != nil {
		n.log.Error("reload refused; the old configuration stays in force", "source", source, "error", err)
		return config.Changes{}, err
	}
	n.log.Info("configuration reloaded", "source", source, "changes", changes.String())
	return changes, nil
}

// reloadLocked is Reload without its log. The caller holds n.reload.
func (n *Node) reloadLocked(dryRun bool) (config.Changes, error) {
	cfg, err := n.opts.Load()
	if err != nil {
		return config.Changes{}, err
	}
	changes, err := config.Diff(n.cfg, cfg)
	if err != nil {
		return config.Changes{}, err
	}
	if err := n.cluster.checkNodes(cfg); err != nil {
		return config.Changes{}, err
	}
	if dryRun {
		return changes, n.apply(cfg, trying)
	}
	if err := n.apply(cfg, strict); err != nil {
		return config.Changes{}, err
	}
	n.setLevel(cfg.Log.Level)
	n.hot.again()
	n.cfgMu.Lock()
	n.cfg, n.resizedAhead = cfg, nil
	n.cfgMu.Unlock()
	n.freeAreas()
	if n.cluster != nil {
		if err := n.cluster.nodesChanged(); err != nil {
			return config.Changes{}, fmt.Errorf("the nodes of the cluster: %w; all else has changed", err)
		}
	}
	return changes, nil
}
