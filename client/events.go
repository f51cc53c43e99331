package client

import (
	"context"
	"errors"

	"jbofd/internal/nvme"
)

// EventKind is the kind of an Event.
type EventKind uint8

// Kinds of events.
const (
	// EventOther: see Event.Raw.
	EventOther EventKind = iota
	// EventNamespaces: namespaces were added, removed or changed; Event.NSIDs names them.
	EventNamespaces
	// EventANA: the state of an ANA group changed.
	EventANA
	// EventDiscovery: the discovery log changed.
	EventDiscovery
)

// Event is an asynchronous event of the controller.
type Event struct {
	Kind EventKind
	// NSIDs are the namespaces of an EventNamespaces. FFFFFFFFh alone means that there are more than the log page
	// holds.
	NSIDs []uint32
	// Raw is DW0 of the completion: type, information, log page.
	Raw uint32
}

// events keeps one Asynchronous Event Request outstanding while the association lasts, and passes events to
// Options.OnEvent. Reading the log page that an event names enables the next event of its type.
func (c *Controller) events(a *association) {
	defer a.wg.Done()
	for {
		var e SQE
		e.SetOpcode(nvme.AdminAsyncEvent)
		var comps [1]Completion
		if err := a.admin.Do(a.ctx, []Command{{SQE: e}}, comps[:]); err != nil {
			return // the association has ended
		}
		if !comps[0].Status.OK() {
			c.opts.Logger.Warn("no asynchronous events", "address", c.opts.URL(), "status", comps[0].Status.String())
			return
		}
		ev := Event{Raw: uint32(comps[0].Result)}
		raw := nvme.AER(ev.Raw)
		buf := make([]byte, 512)
		switch raw {
		case nvme.AERNamespaceChanged:
			ev.Kind = EventNamespaces
			buf = make([]byte, len(nvme.NSList{}))
		case nvme.AERANAChanged:
			ev.Kind = EventANA
			buf = make([]byte, 4096)
		case nvme.AERDiscoveryChanged:
			ev.Kind = EventDiscovery
			buf = make([]byte, nvme.DiscoveryHeaderSize)
		}
		var g SQE
		g.SetOpcode(nvme.AdminGetLogPage)
		g.SetNSID(nvme.NSIDBroadcast)
		g.GetLog().SetLID(raw.LID())
		g.GetLog().SetLenBytes(uint64(len(buf)))
		_, err := a.adminCommand(a.ctx, "Get Log Page (asynchronous event)", g, buf)
		var st *StatusError
		if err != nil && !errors.As(err, &st) {
			return
		}
		if ev.Kind == EventNamespaces && err == nil {
			for id := range (*nvme.NSList)(buf).All() {
				ev.NSIDs = append(ev.NSIDs, id)
			}
		}
		if c.opts.OnEvent != nil && context.Cause(a.ctx) == nil {
			c.opts.OnEvent(ev)
		}
	}
}
