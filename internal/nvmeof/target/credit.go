package target

import (
	"sync/atomic"

	"jbofd/internal/credit"
	"jbofd/internal/nvme"
)

// Windows counts a tenant's controllers whose hosts use credits. Controllers do not know of each other, so what the
// tenant may have outstanding at an SSD is divided among them evenly.
type Windows struct{ n atomic.Int32 }

// Open and Close count one controller.
func (w *Windows) Open()  { w.n.Add(1) }
func (w *Windows) Close() { w.n.Add(-1) }

// Credit is one controller's part of units, as its completions carry it.
//
// hot: 0 allocs
func (w *Windows) Credit(ssd, units int) nvme.Credit {
	return nvme.MakeCredit(uint16(ssd), credit.Part(units, int(w.n.Load())))
}

// FirstCredit is the credit of a tenant's controller at an SSD when no I/O has
// completed yet.
func (s *Service) FirstCredit(t Tenant, ssd int) nvme.Credit {
	return t.Windows.Credit(ssd, s.SSD(ssd).Credit(t.Number))
}
