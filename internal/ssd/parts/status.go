package parts

import (
	"fmt"

	"jbofd/internal/nvme"
	"jbofd/internal/ssd"
)

// MayRetry reports whether a status says that the command may succeed later.
func MayRetry(st nvme.Status) bool {
	if st.DNR() {
		return false
	}
	switch st.Code() {
	case nvme.NamespaceNotReady, nvme.CommandInterrupted, nvme.TransientTransportError, nvme.AbortRequested,
		nvme.AbortedPowerLoss, nvme.AbortedSQDeletion, nvme.AdminMediaNotReady, nvme.FormatInProgress:
		return true
	}
	return false
}

// kindOf returns the sentinel of package ssd for a status.
func kindOf(st nvme.Status) error {
	switch st.Code() {
	case nvme.LBAOutOfRange:
		return ssd.ErrRange
	case nvme.CapacityExceeded:
		return ssd.ErrNoSpace
	case nvme.InvalidOpcode:
		return ssd.ErrUnsupported
	}
	return ssd.ErrMedia
}

// StatusError returns the error of a part whose command has ended with a status: one of package ssd.
func (q *Requests) StatusError(p *Part, st nvme.Status) error {
	r := q.Of(p)
	return fmt.Errorf("%w: %v of %d bytes at %d: %v", kindOf(st), r.Op, p.To-p.From, r.Offset+p.From, st)
}
