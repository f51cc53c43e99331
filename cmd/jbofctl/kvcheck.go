package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
	"jbofd/internal/partition"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
)

func (x *cli) kvCheckCommand() *cobra.Command {
	var keys int
	c := &cobra.Command{
		Use:   "check UUID|PATH",
		Short: "Say what of key-value namespaces is sound, damaged and lost; no key is changed",
		Long: `With a UUID: read all keys of that key-value namespace, while the daemon serves it, and say what is
lost. Values are not read; the scrub does that. Space that damage holds for nothing is freed.

With a PATH: read the whole of every key-value namespace on the drive there, a block device or a regular file, which no
daemon may have open. Values are read as well, so that it takes as long as reading the drive. It is opened for reading
only. A drive without a label that is a single partition is read as that. Besides counts it gives keys with damaged
values, and those that older records of lost segments have.

Exit status: 3 if something is damaged or lost.`,
		Args: one("UUID|PATH"),
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if _, err := admin.ParseUUID(args[0]); err == nil {
			return x.audit(c, args[0], false)
		}
		if keys < 0 {
			return usagef("--keys is %d, must be 0 or more", keys)
		}
		return x.checkDrive(c, args[0], keys)
	}
	c.Flags().IntVar(&keys, "keys", 100, "how many keys of each kind to name at most, with a PATH")
	return c
}

// kvChecked is what was found in a namespace.
type kvChecked struct {
	SubNQN string `json:"subNQN,omitempty"`
	NSID   uint32 `json:"nsid,omitempty"`
	// State is sound, damaged, or failed, if it cannot be opened; Error says why.
	State string `json:"state"`
	Error string `json:"error,omitempty"`
	partition.CheckReport
}

// kvCheckAnswer is what was found on a drive.
type kvCheckAnswer struct {
	APIVersion string      `json:"apiVersion"`
	Path       string      `json:"path"`
	Items      []kvChecked `json:"items"`
}

// checkDrive checks the key-value namespaces on a drive.
func (x *cli) checkDrive(c *cobra.Command, path string, keys int) (err error) {
	dev, err := file.Open(file.Config{Name: filepath.Base(path), Path: path, Engine: file.EngineThreads,
		ReadOnly: true})
	if errors.Is(err, os.ErrNotExist) {
		return usagef("%s is neither the UUID of a namespace (jbofctl namespace list -o json shows them) nor a path",
			path)
	}
	if errors.Is(err, file.ErrInUse) {
		return fmt.Errorf("%w: jbofctl kv check UUID looks at a namespace that is served; to read the drive, stop the "+
			"daemon", err)
	}
	if errors.Is(err, file.ErrSize) {
		return fmt.Errorf("%s is empty or shorter than a block: it has no label of jbofd and no store", path)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	extents, err := extentsToCheck(dev)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	a := kvCheckAnswer{APIVersion: admin.Version, Path: path, Items: []kvChecked{}}
	sound := true
	for i := range extents {
		e := &extents[i]
		n := kvChecked{SubNQN: e.NQN, NSID: e.NSID, State: "sound"}
		show := progress(c, fmt.Sprintf("namespace %d of %d", i+1, len(extents)))
		n.CheckReport, err = partition.Check(dev, partition.CheckOptions{OffsetBytes: e.StartBytes,
			LengthBytes: e.LengthBytes, MaxKeys: keys, Progress: show, Stop: c.Context().Done()})
		show(-1, 0)
		switch {
		case errors.Is(err, partition.ErrCheckStopped):
			return &interruptedError{fmt.Sprintf("interrupted in namespace %d of %d; it begins anew next time", i+1,
				len(extents))}
		case err != nil:
			n.State, n.Error = "failed", err.Error()
		case !n.Sound():
			n.State = "damaged"
		}
		if n.UUID == "" && e.NQN != "" {
			n.UUID = e.UUID.String()
		}
		sound = sound && n.State == "sound"
		a.Items = append(a.Items, n)
	}
	if err := x.print(c, a, func(t *tabwriter.Writer) { a.rows(t) }); err != nil {
		return err
	}
	if !sound {
		return errLoss
	}
	return nil
}

// extentsToCheck are the key-value namespaces on a drive, or all of it if that is a partition without a label.
func extentsToCheck(dev ssd.Device) (all []label.Extent, err error) {
	lab, err := label.Inspect(dev)
	switch {
	case errors.Is(err, label.ErrForeign), errors.Is(err, label.ErrInvalid):
		switch store, storeErr := partition.HasStore(dev); {
		case storeErr != nil:
			return nil, storeErr
		case !store:
			return nil, fmt.Errorf("it has no label of jbofd and no store: %w", err)
		}
		return []label.Extent{{LengthBytes: dev.Info().SizeBytes}}, nil
	case err != nil:
		return nil, err
	}
	for _, e := range lab.Extents {
		if e.Use == label.KV {
			all = append(all, e)
		}
	}
	return all, nil
}

// progress returns what shows on a terminal how far something is; -1 ends it.
func progress(c *cobra.Command, what string) func(done, of int) {
	shown := time.Now()
	return func(done, of int) {
		switch {
		case !isTerminal(c.ErrOrStderr()):
		case done < 0:
			fmt.Fprint(c.ErrOrStderr(), "\r\x1b[K")
		case time.Since(shown) >= showEvery/4 && of > 0:
			shown = time.Now()
			fmt.Fprintf(c.ErrOrStderr(), "\r%s: %d of %d chunks (%d %%)", what, done, of, done*100/of)
		}
	}
}

func (a *kvCheckAnswer) rows(t *tabwriter.Writer) {
	if len(a.Items) == 0 {
		row(t, "no key-value namespace on "+a.Path)
	}
	for i := range a.Items {
		if i > 0 {
			row(t)
		}
		a.Items[i].rows(t)
	}
}

func (n *kvChecked) rows(t *tabwriter.Writer) {
	if n.NSID != 0 {
		row(t, "namespace", fmt.Sprintf("%s nsid %d", n.SubNQN, n.NSID))
	}
	row(t, "uuid", n.UUID)
	row(t, "state", n.State)
	if n.Error != "" {
		row(t, "error", n.Error)
		return
	}
	row(t, "size", size(n.SizeBytes))
	row(t, "keys", n.Objects)
	row(t, "sound values", about(n.SoundValueBytes))
	row(t, "chunks", fmt.Sprintf("%d, %d used, %d free, %d bad", n.Chunks, n.UsedChunks, n.FreeChunks, n.BadChunks))
	if n.Loss != "" {
		row(t, "lost since the last checkpoint", n.Loss)
	}
	row(t, "keys with damaged values", fmt.Sprintf("%d (%d bytes)", n.DamagedValues, n.DamagedBytes))
	row(t, "segments lost with their keys", n.LostSegments)
	row(t, "segments that have lost keys", n.LossySegments)
	for _, o := range []struct {
		what string
		n    int
	}{{"unreadable blocks", n.UnreadableBlocks}, {"lost chunk headers (harmless)", n.LostHeaders}} {
		if o.n > 0 {
			row(t, o.what, o.n)
		}
	}
	if n.OneSuperblock {
		row(t, "superblock", "one copy is damaged or old (harmless: the next start repairs it)")
	}
	for _, k := range n.DamagedKeys {
		row(t, "damaged value of", k)
	}
	for _, k := range n.LostKeys {
		row(t, "probably lost", k)
	}
	for _, id := range n.SwapAreas {
		row(t, "not looked at", "keys in swap area "+id)
	}
}
