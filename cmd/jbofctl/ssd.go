package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"jbofd/internal/admin"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/vfio"
	"jbofd/internal/ssd/vfio/pci"
)

func (x *cli) ssdList(c *cobra.Command, _ []string) error {
	l, err := ask(x, c, (*admin.Client).SSDs)
	if err != nil {
		return err
	}
	return x.print(c, l, func(t *tabwriter.Writer) {
		row(t, "NAME", "BACKEND", "ENGINE", "SIZE", "FREE", "EXTENTS", "STATE", "POLICY", "CONGESTION", "WRITE COST",
			"PATH")
		for _, d := range l.Items {
			row(t, d.Name, d.Backend, d.Engine, size(d.SizeBytes), size(d.FreeBytes), len(d.Extents), state(d),
				d.Policy, d.CongestionState, writeCost(d), d.Path)
		}
	})
}

func state(d admin.SSD) string {
	if d.Error != "" {
		return "failed"
	}
	return "ok"
}

// writeCost is what a drive's policy has found out about writes, if it does.
func writeCost(d admin.SSD) string {
	if d.WriteCost == 0 {
		return ""
	}
	return strconv.FormatFloat(d.WriteCost, 'f', 1, 64)
}

// memory describes memory of a drive.
func memory(m admin.Memory) string {
	text := size(m.SizeBytes) + ", volatile"
	if m.Persistent {
		text = size(m.SizeBytes) + ", persistent"
	}
	if m.NotRestored {
		text += ", not restored after a loss of power"
	}
	if m.Error != "" {
		text += ", " + m.Error
	}
	return text
}

// ssdAnswer is one drive.
type ssdAnswer struct {
	APIVersion string `json:"apiVersion"`
	admin.SSD
}

func (x *cli) ssdShow(c *cobra.Command, args []string) error {
	a, err := x.findSSD(c, args[0])
	if err != nil {
		return err
	}
	return x.print(c, a, func(t *tabwriter.Writer) {
		row(t, "name", a.Name)
		row(t, "backend", a.Backend)
		row(t, "path", a.Path)
		row(t, "engine", a.Engine)
		row(t, "uuid", a.UUID)
		row(t, "size", size(a.SizeBytes))
		row(t, "free", size(a.FreeBytes))
		row(t, "state", state(a.SSD))
		row(t, "policy", a.Policy)
		row(t, "congestion", a.CongestionState)
		row(t, "write cost", writeCost(a.SSD))
		row(t, "health", health(a.Health))
		for _, m := range a.Memory {
			row(t, m.Kind, memory(m))
		}
		if a.Error != "" {
			row(t, "error", a.Error)
		}
		if len(a.Extents) == 0 {
			return
		}
		row(t)
		row(t, "START", "SIZE", "USE", "NSID", "SUBSYSTEM", "CONFIGURED", "UUID")
		for _, e := range a.Extents {
			configured := yesNo(e.Configured)
			if a.Name == "" { // read from the path: nobody knows a configuration
				configured = ""
			}
			row(t, size(e.StartBytes), size(e.LengthBytes), e.Use, e.NSID, e.SubNQN, configured, e.UUID)
		}
	})
}

// findSSD asks the daemon for the drive of that name or path, and reads the drive at
// that path if no daemon has it.
func (x *cli) findSSD(c *cobra.Command, what string) (ssdAnswer, error) {
	l, err := ask(x, c, (*admin.Client).SSDs)
	if err != nil && !errors.Is(err, admin.ErrNoDaemon) {
		return ssdAnswer{}, err
	}
	for _, d := range l.Items {
		if d.Name == what || d.Path != "" && samePath(d.Path, what) {
			return ssdAnswer{l.APIVersion, d}, nil
		}
	}
	if _, statErr := os.Stat(what); statErr != nil && !isAddress(what) {
		if err != nil {
			return ssdAnswer{}, fmt.Errorf("%w; and there is no path %s", err, what)
		}
		var names []string
		for _, d := range l.Items {
			names = append(names, d.Name)
		}
		return ssdAnswer{}, fmt.Errorf("the daemon has no drive %q (it has %s), and there is no such path", what,
			strings.Join(names, ", "))
	}
	dev, err := openDrive(what, true)
	if err != nil {
		return ssdAnswer{}, err
	}
	defer dev.Close()
	a := describe(dev)
	lab, err := label.Inspect(dev)
	if err != nil {
		a.Error = err.Error()
		return a, nil
	}
	a.fill(lab)
	return a, nil
}

// describe is a drive without its label.
func describe(dev ssd.Device) ssdAnswer {
	i := dev.Info()
	a := ssdAnswer{admin.Version, admin.SSD{Backend: i.Backend, Path: i.Path, Engine: i.Engine,
		SizeBytes: i.SizeBytes, Extents: []admin.Extent{}}}
	if h, ok := ssd.HealthOf(dev); ok {
		a.Health = admin.NewHealth(&h)
	}
	a.Memory = admin.NewMemory(dev)
	return a
}

// fill adds what the label says.
func (a *ssdAnswer) fill(lab *label.Label) {
	a.UUID, a.FreeBytes = lab.DriveUUID.String(), lab.FreeBytes()
	for _, e := range lab.Extents {
		a.Extents = append(a.Extents, admin.Extent{UUID: e.UUID.String(), Use: e.Use.String(),
			StartBytes: int64(e.StartBytes), LengthBytes: e.LengthBytes, NSID: e.NSID, SubNQN: e.NQN})
	}
}

func isAddress(what string) bool {
	_, err := pci.Parse(what)
	return err == nil
}

func samePath(a, b string) bool {
	i, err1 := os.Stat(a)
	j, err2 := os.Stat(b)
	return err1 == nil && err2 == nil && os.SameFile(i, j)
}

// openDrive opens and locks a drive that no daemon uses, by its path or the address of its controller.
func openDrive(path string, readOnly bool) (ssd.Device, error) {
	if a, err := pci.Parse(path); err == nil {
		return vfio.OpenAddress(vfio.Config{Name: a, Address: a})
	}
	dev, err := file.Open(file.Config{Name: filepath.Base(path), Path: path, Engine: file.EngineThreads,
		ReadOnly: readOnly})
	if errors.Is(err, file.ErrInUse) {
		return nil, fmt.Errorf("%w: stop the daemon, or take the drive out of its configuration and restart it", err)
	}
	if errors.Is(err, file.ErrSize) {
		return nil, fmt.Errorf("%s is empty or shorter than a block: it cannot be a drive", path)
	}
	return dev, err
}

func (x *cli) formatCommand() *cobra.Command {
	var force, yes bool
	c := &cobra.Command{
		Use:   "format PATH",
		Short: "Give a drive that nobody uses to jbofd; what it holds is lost",
		Long: `Write an empty label to the drive at PATH, a block device or a regular file that no daemon uses, and
overwrite the rest with zeroes if it held anything, so that no namespace made there shows it.

On a terminal it says what it sees on the drive and asks for its name. Elsewhere it formats a blank
drive with --yes or --force, and any other only with --force.`,
		Args: one("PATH"),
	}
	c.RunE = func(c *cobra.Command, args []string) error { return x.format(c, args[0], force, yes) }
	c.Flags().BoolVar(&force, "force", false, "format even if the drive is not blank")
	c.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return c
}

func (x *cli) format(c *cobra.Command, path string, force, yes bool) (err error) {
	dev, err := openDrive(path, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	lab, seen := label.Inspect(dev)
	blank := errors.Is(seen, label.ErrBlank)
	var what string
	switch {
	case blank:
		what = path + " (" + size(dev.Info().SizeBytes) + ") is blank."
	case seen == nil:
		what = fmt.Sprintf("%s (%s) is drive %s of a jbofd; namespaces and swap areas: %d", path,
			size(dev.Info().SizeBytes), lab.DriveUUID, len(lab.Extents))
		for _, e := range lab.Extents {
			name := fmt.Sprintf("%s nsid %d", e.NQN, e.NSID)
			if e.Use == label.Swap {
				name = "swap area, which may have keys of other drives"
			}
			what += fmt.Sprintf("\n  %s, %s, %s", name, size(e.LengthBytes), e.UUID)
		}
	case errors.Is(seen, label.ErrForeign), errors.Is(seen, label.ErrCorrupt), errors.Is(seen, label.ErrVersion),
		errors.Is(seen, label.ErrShrunk):
		what = fmt.Sprintf("%s (%s): %v.", path, size(dev.Info().SizeBytes), seen)
	default:
		return seen
	}
	asked := false
	switch {
	case yes && (blank || force):
	case isTerminal(x.in):
		if err := x.confirm(c, what+"\nWhatever it holds will be lost for good.", filepath.Base(path)); err != nil {
			return err
		}
		asked = true
	case force:
	case blank:
		return usagef("%s\nNot formatted: standard input is no terminal to ask on; give --yes", what)
	default:
		return usagef("%s\nNot formatted: only with --force", what)
	}
	store, err := label.Format(dev, label.NewUUID(), force || asked)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if !blank {
		if err := erase(c, dev); err != nil {
			return err
		}
	}
	a := describe(dev)
	a.fill(store.Label())
	return x.print(c, a, func(t *tabwriter.Writer) {
		row(t, fmt.Sprintf("%s formatted: drive %s, %s, %s free", path, a.UUID, size(a.SizeBytes), size(a.FreeBytes)))
	})
}

// eraseStep is how much one request zeroes, so that Ctrl-C is heard.
const eraseStep = 256 << 20

// erase makes everything between the labels read as zeroes; drives that can do so
// deallocate it. It says how far it is on standard error.
func erase(c *cobra.Command, dev ssd.Device) error {
	q, err := dev.OpenQueue(1)
	if err != nil {
		return err
	}
	end := label.DataEnd(dev.Info().SizeBytes)
	for at := int64(label.AlignBytes); at < end && err == nil; at += eraseStep {
		if err = c.Context().Err(); err != nil {
			break
		}
		var done [1]ssd.Completion
		q.Submit([]ssd.Request{{Op: ssd.WriteZeroes, Flags: ssd.Unmap, Offset: at, Len: min(eraseStep, end-at)}})
		for ssd.Await(q, done[:], -1) == 0 {
			if err := dev.Healthy(); err != nil {
				return errors.Join(err, q.Close())
			}
		}
		err = done[0].Err
		fmt.Fprintf(c.ErrOrStderr(), "\rerasing: %s of %s", size(min(at+eraseStep, end)), size(end))
	}
	fmt.Fprintln(c.ErrOrStderr())
	return errors.Join(err, q.Close())
}

// confirm asks on the terminal for a name to be typed.
//
// Errors: a usage error if there is no terminal; another name was typed.
func (x *cli) confirm(c *cobra.Command, what, name string) error {
	if !isTerminal(x.in) {
		return usagef("%s\nNot done: standard input is no terminal to ask on; give --yes", what)
	}
	fmt.Fprintf(c.ErrOrStderr(), "%s\nType %s to go on: ", what, name)
	line, err := bufio.NewReader(x.in).ReadString('\n')
	if err != nil && line == "" {
		return errors.New("nothing typed; nothing changed")
	}
	if strings.TrimSpace(line) != name {
		return errors.New("that is not its name; nothing changed")
	}
	return nil
}

func isTerminal(in any) bool {
	f, ok := in.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
