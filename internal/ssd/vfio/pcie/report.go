package pcie

import (
	"errors"
	"fmt"
	"slices"

	"jbofd/internal/nvme"
)

// Reports of a controller: log pages, and asynchronous events, each of which completes an event request. A controller
// reports an event of one kind again only after the log page that explains the event was read.

// maxEvents bounds the outstanding event requests. There are fewer kinds of events.
const maxEvents = 8

// warnings are the critical warnings that are to be events: those that NVMe 1.4 and earlier versions know.
const warnings = nvme.SMARTWarnSpare | nvme.SMARTWarnTemperature | nvme.SMARTWarnReliability | nvme.SMARTWarnReadOnly |
	nvme.SMARTWarnBackup

// askEvents sets which events the controller is to report. A controller that does not have the feature reports those
// that it chooses.
func (c *Controller) askEvents() error {
	c.listen = min(c.props.Events, maxEvents)
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminSetFeatures)
		e.Features().SetFID(nvme.FIDAsyncEvent)
		e.Features().SetValue(warnings | c.props.Notices)
	}, nil)
	var refused StatusError
	if err != nil && !errors.As(err, &refused) {
		return fmt.Errorf("asynchronous events: %w", err)
	}
	return nil
}

// told handles the completion of an event request.
func (c *Controller) told(place int, cqe *nvme.CQE) {
	if !c.asked[place] {
		return // a command that Do does not wait for any more
	}
	delete(c.asked, place)
	if !cqe.Status().OK() {
		c.listen = len(c.asked) // the controller accepts no more
		return
	}
	c.events = append(c.events, nvme.AER(cqe.DW0()))
}

// Events returns the asynchronous events since the last call.
//
// Errors: ErrInvalidResponse.
func (c *Controller) Events() ([]nvme.AER, error) {
	for {
		place, cqe, ok, err := c.admin.Reap()
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		c.told(place, &cqe)
	}
	c.admin.Seen()
	events := c.events
	c.events = nil
	return events, nil
}

// Heard reports whether Events may return something for which no interrupt comes any more: Do waits for interrupts,
// too, and returns as soon as it has the completion of its own command.
func (c *Controller) Heard() bool { return len(c.events) > 0 || c.admin.Ready() }

// Listening reports whether as many event requests are outstanding as the controller accepts.
func (c *Controller) Listening() bool { return len(c.asked) >= c.listen }

// Listen sends event requests, until Listening.
func (c *Controller) Listen() {
	for !c.Listening() {
		e, place := c.admin.Next()
		e.SetOpcode(nvme.AdminAsyncEvent)
		c.asked[place] = true
	}
	c.admin.Submit()
}

// Paused reports whether the controller does not process commands for a while, because it activates firmware.
func (c *Controller) Paused() bool {
	s := c.fn.Load32(nvme.PropCSTS)
	return s != gone && nvme.CSTS(s)&nvme.CSTSPP != 0
}

// logBytes is how much of a log page is read to clear the event that it explains.
var logBytes = map[uint8]int{nvme.LIDSMART: len(nvme.SMARTLog{}), nvme.LIDFirmwareSlot: len(nvme.FirmwareSlotLog{}),
	nvme.LIDChangedNS: len(nvme.NSList{})}

// Log reads a log page of the whole controller, from its beginning, and thereby clears the event that the page
// explains.
//
// Errors: as Do.
func (c *Controller) Log(lid uint8) ([]byte, error) {
	n := 64
	if known := logBytes[lid]; known > 0 {
		n = known
	}
	clear(c.data[:n])
	err := c.Do(func(e *nvme.SQE) {
		e.SetOpcode(nvme.AdminGetLogPage)
		e.SetNSID(nvme.NSIDBroadcast)
		e.GetLog().SetLID(lid)
		e.GetLog().SetLenBytes(uint64(n))
		e.SetPRP1(c.dataAt)
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("log page %#02x: %w", lid, err)
	}
	return slices.Clone(c.data[:n]), nil
}
