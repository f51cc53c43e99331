package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"jbofd/internal/admin"
)

func (x *cli) kvExportCommand() *cobra.Command {
	var resume string
	c := &cobra.Command{
		Use:   "export UUID > FILE",
		Short: "Write all keys and values of a key-value namespace to standard output, while it is served",
		Long: `Write all keys of the key-value namespace of that UUID to standard output, with values, versions and
expiry, while the daemon serves it, at the weight of the tenant kv-background.

An object that exists all the time is written exactly once, with a version that it had at some time during the export,
and its whole value. Objects that are stored or deleted meanwhile may be there or not. For the state of one moment, keep
hosts from writing until it has ended.

The file consists of batches with checksums that follow each other without a gap; the last one is marked. What was
written is checked. --continue FILE takes up an export of the same namespace that has ended early: it keeps the sound
batches of FILE, cuts off an incomplete last one, and appends the rest. Any other file it refuses and leaves as it is.

Exit status: 3 if objects are missing because they are damaged, 130 if it was interrupted.`,
		Args: one("UUID"),
	}
	c.RunE = func(c *cobra.Command, args []string) error { return x.export(c, args[0], resume) }
	c.Flags().StringVar(&resume, "continue", "", "append what is missing to the export in `FILE`")
	return c
}

func (x *cli) kvImportCommand() *cobra.Command {
	var verify bool
	c := &cobra.Command{
		Use:   "import UUID < FILE",
		Short: "Store the keys and values of an export, from standard input, in a key-value namespace that is served",
		Long: `Store what jbofctl kv export has written in the key-value namespace of that UUID, while the daemon
serves it. Each object keeps its version, and is stored only if the namespace has no newer one. So an import that has
ended early is just repeated, and to get exactly what was exported, import it into an empty namespace. What was deleted
or dropped since is stored again, unless the key has a tombstone; after a drop the import waits until the dropped range
is cleared, and fails if that takes more than a minute.

--verify stores nothing: it only checks that the file is a complete and sound export, without a daemon.`,
		Args: func(c *cobra.Command, args []string) error {
			if verify {
				return none(c, args)
			}
			return one("UUID")(c, args)
		},
	}
	c.RunE = func(c *cobra.Command, args []string) error {
		if verify {
			return x.importAll(c, "")
		}
		if _, err := admin.ParseUUID(args[0]); err != nil {
			return usagef("%v; jbofctl namespace list -o json shows the UUIDs", err)
		}
		return x.importAll(c, args[0])
	}
	c.Flags().BoolVar(&verify, "verify", false, "only check the file")
	return c
}

// kvCopied is the answer of an export or import.
type kvCopied struct {
	APIVersion string `json:"apiVersion"`
	admin.KVTotals
	// Applied is how many objects and tombstones an import has stored, because they were newer.
	Applied int64 `json:"applied,omitempty"`
}

func (a *kvCopied) rows(t *tabwriter.Writer) {
	row(t, "keys", a.Objects)
	row(t, "values", about(a.ValueBytes))
	row(t, "batches", a.Batches)
	if a.Tombstones > 0 {
		row(t, "tombstones", a.Tombstones)
	}
	if a.LostBatches > 0 {
		row(t, "batches with missing keys", a.LostBatches)
	}
}

// export writes an export to standard output, or the rest of one to a file.
func (x *cli) export(c *cobra.Command, uuid, resume string) (err error) {
	if _, err := admin.ParseUUID(uuid); err != nil {
		return usagef("%v; jbofctl namespace list -o json shows the UUIDs", err)
	}
	out := c.OutOrStdout()
	before := &admin.KVCopy{}
	var f *os.File // if it is not nil, what is behind before is still to be cut off
	switch {
	case resume != "":
		if f, err = os.OpenFile(resume, os.O_RDWR, 0); err != nil {
			return err
		}
		defer func(f *os.File) { err = errors.Join(err, f.Close()) }(f)
		if before, err = soundPart(f); err != nil {
			return err
		}
		out = f
	case isTerminal(out):
		return usagef("an export is not for a terminal: write it to a file, as in jbofctl kv export %s > FILE", uuid)
	}
	in, err := x.client().ExportKV(c.Context(), uuid, before.To())
	if err != nil {
		return err
	}
	defer in.Close()
	copied := before.Follow(in)
	show := copying(c, before.Bytes)
	defer show(nil)
	for {
		written := copied.Objects
		b, err := copied.Next()
		switch {
		case errors.Is(err, io.EOF):
		case err != nil && c.Context().Err() != nil:
			return &interruptedError{fmt.Sprintf("interrupted after %d keys; --continue FILE takes the export up",
				written)}
		case errors.Is(err, admin.ErrOtherNamespace):
			return fmt.Errorf("%s is an export of another namespace than %s, or of one that had its UUID before; "+
				"nothing is changed", resume, uuid)
		case err != nil:
			return fmt.Errorf("the export ended early, after %d keys: %w; --continue FILE takes it up", written, err)
		}
		if err != nil {
			break // complete
		}
		if f != nil {
			if err := cutBehind(c, f, &before.KVTotals); err != nil {
				return err
			}
			f = nil
		}
		if _, err := out.Write(b); err != nil {
			return fmt.Errorf("the export ended early, after %d keys: %w; --continue FILE takes it up", written, err)
		}
		show(&copied.KVTotals)
	}
	show(nil)
	a := kvCopied{APIVersion: admin.Version, KVTotals: copied.KVTotals}
	c.SetOut(c.ErrOrStderr())
	if err := x.print(c, a, a.rows); err != nil {
		return err
	}
	if a.LostBatches > 0 {
		return errLoss
	}
	return nil
}

// soundPart reads the sound batches at the beginning of an export that has ended early. Only an incomplete last batch
// may be behind them: anything else there may be worth more than what an export would put in its place.
func soundPart(f *os.File) (*admin.KVCopy, error) {
	before := admin.NewKVCopy(f)
	var err error
	for err == nil {
		_, err = before.Next()
	}
	st, statErr := f.Stat()
	switch {
	case statErr != nil:
		return nil, statErr
	case !errors.Is(err, io.EOF) && !errors.Is(err, admin.ErrKVCopy):
		return nil, fmt.Errorf("%s cannot be read: %w", f.Name(), err)
	case before.Batches == 0 && st.Mode().IsRegular() && st.Size() == 0:
		return before, nil
	case before.Batches == 0:
		return nil, fmt.Errorf("%s is not an export that can be continued, and stays as it is: %w", f.Name(), err)
	case before.Complete && errors.Is(err, io.EOF):
		return nil, fmt.Errorf("%s is complete already", f.Name())
	case !errors.Is(err, io.ErrUnexpectedEOF):
		return nil, fmt.Errorf("%s stays as it is: %w; to give up what is there and behind it: truncate -s %d %s",
			f.Name(), err, before.Bytes, f.Name())
	}
	return before, nil
}

// cutBehind cuts off what is behind the sound batches of an export, and says so.
func cutBehind(c *cobra.Command, f *os.File, sound *admin.KVTotals) error {
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	fmt.Fprintf(c.ErrOrStderr(), "%s: %d keys in %d batches (%s) are kept, %d bytes of an incomplete batch are not\n",
		f.Name(), sound.Objects, sound.Batches, about(sound.Bytes), end-sound.Bytes)
	_, err = f.Seek(sound.Bytes, io.SeekStart)
	return errors.Join(err, f.Truncate(sound.Bytes))
}

// importAll reads an export from standard input and stores it, or only checks it if uuid is empty.
func (x *cli) importAll(c *cobra.Command, uuid string) error {
	if isTerminal(x.in) {
		return usagef("an import comes from a file, as in jbofctl kv import UUID < FILE")
	}
	if !c.Flags().Changed("timeout") {
		x.timeout = 0 // a batch takes as long as it takes
	}
	client := x.client() // one: the socket that is there when the daemon has gone may be another
	copied, show := admin.NewKVCopy(x.in), copying(c, 0)
	defer show(nil)
	a := kvCopied{APIVersion: admin.Version}
	for {
		read := copied.Objects
		b, err := copied.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err == nil {
			err = c.Context().Err()
		}
		if err == nil && uuid != "" {
			var done admin.KVImported
			ctx, cancel := x.bounded(c)
			done, err = client.ImportKV(ctx, uuid, b)
			cancel()
			a.Applied += int64(done.Applied)
		}
		switch {
		case err != nil && c.Context().Err() != nil && uuid == "":
			return &interruptedError{fmt.Sprintf("interrupted after %d keys", read)}
		case err != nil && c.Context().Err() != nil:
			return &interruptedError{fmt.Sprintf("interrupted after %d keys, %d of them stored; repeat the import",
				read, a.Applied)}
		case err != nil && uuid != "" && read > 0:
			return fmt.Errorf("after %d keys, %d of them stored: %w", read, a.Applied, err)
		case err != nil:
			return err
		}
		show(&copied.KVTotals)
	}
	show(nil)
	a.KVTotals = copied.KVTotals
	state := "complete and sound"
	if a.LostBatches > 0 {
		state = fmt.Sprintf("complete; %d batches say that keys are missing", a.LostBatches)
	}
	if err := x.print(c, a, func(t *tabwriter.Writer) {
		a.rows(t)
		if uuid != "" {
			row(t, "stored", a.Applied)
		} else {
			row(t, "state", state)
		}
	}); err != nil {
		return err
	}
	if a.LostBatches > 0 {
		return errIncomplete
	}
	return nil
}

// copying returns what shows on a terminal how far an export or import is; nil ends it. Positions are hashes, so that
// the one that was reached says which part of the keys is done. The first bytes are there already.
func copying(c *cobra.Command, first int64) func(*admin.KVTotals) {
	if !isTerminal(c.ErrOrStderr()) {
		return func(*admin.KVTotals) {}
	}
	var last admin.KVTotals
	var mu sync.Mutex // guards last: the bar is drawn by a goroutine
	began := time.Now()
	all := mpb.New(mpb.WithOutput(c.ErrOrStderr()), mpb.WithWidth(40))
	bar := all.AddBar(barSteps, mpb.BarRemoveOnComplete(), mpb.AppendDecorators(decor.Percentage(),
		decor.Any(func(decor.Statistics) string {
			mu.Lock()
			defer mu.Unlock()
			rate := float64(max(0, last.Bytes-first)) / (1 << 20) / max(time.Since(began).Seconds(), 0.001)
			return fmt.Sprintf("  %d keys, %d MiB, %.0f MiB/s", last.Objects, last.Bytes>>20, rate)
		})))
	ended := false
	return func(t *admin.KVTotals) {
		if t == nil {
			if !ended {
				bar.Abort(true)
				all.Wait()
			}
			ended = true
			return
		}
		mu.Lock()
		last = *t
		mu.Unlock()
		bar.SetCurrent(int64(t.Done * (barSteps - 1)))
	}
}

// barSteps is the length of a progress bar in its own units.
const barSteps = 1000
