package main

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"jbofd/internal/admin"
	"jbofd/internal/ssd/file"
	"jbofd/internal/ssd/label"
	"jbofd/internal/ssd/vfio/pci"
)

// bindAnswer is an NVMe controller after a command.
type bindAnswer struct {
	Address string `json:"address"`
	Driver  string `json:"driver"`
	Group   string `json:"iommuGroup"`
}

func (x *cli) bindCommands() []*cobra.Command {
	force := false
	bind := &cobra.Command{
		Use:   "bind ADDRESS",
		Short: "Take an NVMe controller from the kernel, for backend nvme",
		Long: `Give the NVMe controller at a PCI address, as 0000:03:00.0, to the driver vfio-pci, so that a daemon can
drive it itself (ssds[].backend: nvme). The kernel's block devices of it are gone then; what is on them stays.

It is refused while one of them is in use, as by a mounted file system, and without --force also if one holds
something that is not jbofd's. It lasts until the machine starts again. "jbofctl ssd controllers" says which there are.`,
		Args: one("ADDRESS"),
	}
	bind.RunE = func(c *cobra.Command, args []string) error { return x.bind(c, args[0], pci.Driver, force) }
	bind.Flags().BoolVar(&force, "force", false,
		"also if a block device of it holds something else than a drive of jbofd")
	unbind := &cobra.Command{
		Use:   "unbind ADDRESS",
		Short: "Give an NVMe controller back to the kernel",
		Long: `Give the NVMe controller at a PCI address to the kernel's own driver, so that it has block devices again.
Without --force it is refused while a process, such as a daemon, has it open.`,
		Args: one("ADDRESS"),
	}
	unbind.RunE = func(c *cobra.Command, args []string) error { return x.bind(c, args[0], "", force) }
	unbind.Flags().BoolVar(&force, "force", false, "also if a process has it open, which loses it")
	list := &cobra.Command{Use: "controllers",
		Short: "List the NVMe controllers of the machine, and which driver has them", Args: none,
		RunE: x.listControllers}
	return []*cobra.Command{list, bind, unbind}
}

// controllersAnswer lists the NVMe controllers of the machine.
type controllersAnswer struct {
	APIVersion string       `json:"apiVersion"`
	Items      []bindAnswer `json:"items"`
}

// listControllers shows the NVMe controllers of the machine.
func (x *cli) listControllers(c *cobra.Command, _ []string) error {
	all, err := pci.Bus{}.NVMe()
	if err != nil {
		return err
	}
	list := controllersAnswer{APIVersion: admin.Version, Items: []bindAnswer{}}
	for _, i := range all {
		list.Items = append(list.Items, bindAnswer{i.Address, i.Driver, i.Group})
	}
	return x.print(c, list, func(t *tabwriter.Writer) {
		row(t, "ADDRESS", "DRIVER", "IOMMU GROUP", "BLOCK DEVICES")
		for _, i := range all {
			row(t, i.Address, i.Driver, i.Group, strings.Join(i.Blocks, " "))
		}
	})
}

// bind gives a controller to a driver; empty: the kernel's.
func (x *cli) bind(c *cobra.Command, address, driver string, force bool) error {
	bus := pci.Bus{}
	i, err := bus.Find(address)
	if errors.Is(err, pci.ErrAddress) {
		return usagef("%v", err)
	}
	if err != nil {
		return err
	}
	if !i.NVMe() {
		return fmt.Errorf("%s is no NVMe controller: its class is %#06x", i.Address, i.Class)
	}
	if err := bus.CheckFree(i); err != nil && !force {
		return err
	}
	for _, name := range i.Blocks {
		if err := mayTake(filepath.Join("/dev", name), force); err != nil {
			return err
		}
	}
	if err := bus.Bind(i.Address, driver); err != nil {
		return err
	}
	if i, err = bus.Find(i.Address); err != nil {
		return err
	}
	a := bindAnswer{i.Address, i.Driver, i.Group}
	return x.print(c, a, func(t *tabwriter.Writer) {
		row(t, "address", a.Address)
		row(t, "driver", a.Driver)
		row(t, "iommu group", a.Group)
	})
}

// mayTake looks whether a block device may be taken from the kernel.
//
// Errors: it is in use, or, without force, it holds something else than a drive of jbofd.
func mayTake(path string, force bool) (err error) {
	dev, err := file.Open(file.Config{Name: path, Path: path, Engine: file.EngineThreads, ReadOnly: true})
	if errors.Is(err, file.ErrInUse) {
		return fmt.Errorf("%s is in use: %w", path, err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	_, err = label.Inspect(dev)
	switch {
	case err == nil, errors.Is(err, label.ErrBlank), force:
		return nil
	}
	return fmt.Errorf("%s: %w; only with --force", path, err)
}
